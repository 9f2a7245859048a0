from __future__ import annotations

import gc
import weakref

import torch

from lockstep.memory import Recycled, garbage_when_told


def test_memory_of_the_living_is_not_given_out() -> None:
    recycled = Recycled()
    first = recycled.empty((2, 3)).fill_(1.0)
    row = first[1]
    del first
    second = recycled.empty((2, 3)).fill_(2.0)
    assert row.tolist() == [1.0] * 3
    assert second.tolist() == [[2.0] * 3] * 2


def test_memory_saved_for_backward_is_not_given_out() -> None:
    recycled = Recycled()
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * recycled.empty((4,)).fill_(3.0)).sum()
    recycled.empty((4,)).fill_(5.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None and weight.grad.tolist() == [3.0] * 4


def test_memory_is_used_again() -> None:
    recycled = Recycled()
    address = recycled.empty((8,)).data_ptr()
    assert recycled.empty((4, 2)).data_ptr() == address
    assert recycled.empty((2, 3)).data_ptr() == address  # the last batch of an epoch is smaller
    held = [recycled.empty((8,)) for _ in range(5)]
    assert len({tensor.data_ptr() for tensor in held}) == 5
    del held
    recycled.empty((8,))
    assert len(recycled._kept) == 2


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_looked_for_when_told() -> None:
    assert gc.isenabled()
    with garbage_when_told():
        garbage = [weakref.ref(Cycle()) for _ in range(2 * gc.get_threshold()[0])]
        assert all(ref() for ref in garbage)
        gc.collect(1)
        assert not any(ref() for ref in garbage)
    assert gc.isenabled() and gc.get_freeze_count() == 0
