from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from lockstep.data.sampler import (
    GROUP_BLOCKS,
    MicroSlice,
    epoch_order,
    num_micro_batches,
    sample_seeds,
    window_slices,
)


@pytest.mark.parametrize("num_samples", [1, 2, 7, 1000])
def test_epoch_order_is_a_permutation_of_seed_and_epoch(num_samples: int) -> None:
    order = epoch_order(3, 5, num_samples)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(num_samples))
    np.testing.assert_array_equal(order, epoch_order(3, 5, num_samples))
    if num_samples > 10:
        assert (order != epoch_order(3, 6, num_samples)).any()
        assert (order != epoch_order(4, 5, num_samples)).any()
        assert (order != epoch_order(5, 3, num_samples)).any()


def test_order_and_seeds_never_change() -> None:
    """A resumed run on another machine or numpy must meet the same samples."""
    assert epoch_order(0, 0, 8).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert sample_seeds(0, 0, [0, 1]).tolist() == [1195769770526638388, 460431337797920840]


@pytest.mark.parametrize("num_samples", [1, 7, 999, 20_000])
def test_order_in_blocks(num_samples: int) -> None:
    block, group = 8, 8 * GROUP_BLOCKS
    order = epoch_order(3, 5, num_samples, block=block)
    assert sorted(order) == list(range(num_samples))
    np.testing.assert_array_equal(order, epoch_order(3, 5, num_samples, block=block))
    for start in range(0, num_samples, group):
        # The last block of all may be shorter, and shifts the ends of what follows it.
        assert len(np.unique(order[start : start + group] // block)) <= GROUP_BLOCKS + 1
    if num_samples > group:
        near = abs(np.diff(order[:group]))
        assert np.median(near) > num_samples / 8  # blocks from everywhere, well mixed
        assert (order != epoch_order(3, 6, num_samples, block=block)).mean() > 0.9


def test_epoch_order_is_uniform() -> None:
    orders = np.stack([epoch_order(0, epoch, 6) for epoch in range(3000)])
    counts = np.stack([(orders == k).sum(0) for k in range(6)])
    assert abs(counts - 500).max() < 100


def test_sample_seeds_belong_to_the_sample() -> None:
    seeds = sample_seeds(1, 2, np.arange(10_000))
    assert seeds.dtype == np.int64 and (seeds >= 0).all()
    assert len(set(seeds.tolist())) == 10_000
    some = [17, 3, 9_999]
    np.testing.assert_array_equal(sample_seeds(1, 2, some), seeds[some])
    bits = (seeds[:, None] >> np.arange(63)) & 1
    assert abs(bits.mean(0) - 0.5).max() < 0.03


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"seed": 2, "epoch": 1}, id="swapped"),
        pytest.param({"seed": 1, "epoch": 3}, id="epoch"),
        pytest.param({"seed": 1, "epoch": 2, "stream": 1}, id="stream"),
        pytest.param({"seed": 2**63 + 1, "epoch": 2}, id="large seed"),
    ],
)
def test_sample_seeds_differ(other: dict[str, int]) -> None:
    mine = sample_seeds(1, 2, range(100))
    assert not set(mine.tolist()) & set(sample_seeds(indices=range(100), **other).tolist())


@pytest.mark.parametrize("micro", [None, 1, 3, 5, 64])
def test_slices_cover_the_window_exactly_once(micro: int | None) -> None:
    for count, world, start in product([1, 2, 3, 5, 8, 17, 31], [1, 2, 3, 4, 7], [0, 6]):
        stop = start + count
        ranks = [window_slices(start, stop, micro, rank, world) for rank in range(world)]
        assert len({len(slices) for slices in ranks}) == 1
        pieces = [s for slices in ranks for s in slices]
        taken = sorted(p for s in pieces for p in range(s.start, s.stop))
        assert taken == list(range(start, stop))
        busy = [s for s in pieces if s.start < s.stop]
        assert len(busy) == num_micro_batches(start, stop, micro, world)
        assert sorted(s.index for s in busy) == list(range(len(busy)))
        assert all(start <= s.start <= s.stop <= stop for s in pieces)


def test_micro_batches_do_not_depend_on_the_number_of_processes() -> None:
    def chunks(world: int) -> set[MicroSlice]:
        ranks = (window_slices(10, 47, 5, rank, world) for rank in range(world))
        return {s for slices in ranks for s in slices if s.start < s.stop}

    assert all(chunks(world) == chunks(1) for world in (2, 3, 4, 11))


def test_balanced_slices_differ_by_one() -> None:
    sizes = [s.stop - s.start for r in range(4) for s in window_slices(0, 14, None, r, 4)]
    assert sizes == [4, 4, 3, 3]


def test_chunks_go_round_the_ranks() -> None:
    assert window_slices(0, 10, 3, 1, 3) == [MicroSlice(3, 6, 1), MicroSlice(10, 10, 4)]
