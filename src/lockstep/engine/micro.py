"""How many images a forward pass holds (``batch.micro=auto``), found by trying."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from lockstep.config.plan import even_micro
from lockstep.config.schema import Precision
from lockstep.data.loader import Batch
from lockstep.data.sampler import MicroSlice
from lockstep.engine.state import TrainState
from lockstep.engine.step import StepSums, micro_step, update
from lockstep.strategy.base import Strategy

_SPARE = 0.04
"""Share of the GPU's memory that has to stay free: a training fragments it more than a trial."""
_NO_MEMORY = ("out of memory", "ALLOC_FAILED")


def fewest_rounds(fits: Callable[[int], bool], slice_size: int, start: int) -> int | None:
    """Fewest forward passes of equal size into which a slice has to be cut; None: not one image fits.

    Args:
        fits: whether so many images fit; more of them never need less.
        slice_size: images of a process's part of a step.
        start: rounds to begin with; more are tried until they fit, then fewer.
    """
    failed, rounds = 0, start
    while not fits(even_micro(slice_size, rounds)):
        if even_micro(slice_size, rounds) == 1:
            return None
        failed, rounds = rounds, min(2 * rounds, slice_size)
    while rounds - failed > 1:
        middle = (rounds + failed) // 2
        if fits(even_micro(slice_size, middle)):
            rounds = middle
        else:
            failed = middle
    return rounds


def holds(
    state: TrainState,
    strategy: Strategy,
    precision: Precision,
    device: torch.device,
    *,
    micro: int,
    image_size: int,
    num_classes: int,
) -> bool:
    """Whether a step of two micro-batches of random images fits this rank's device.

    Changes ``state``, which is of no more use after a failure under FSDP. All ranks enter here.
    """
    try:
        sums = StepSums.on(device)
        for index in range(2):  # the second meets the gradients of the first
            micro_step(
                state,
                strategy,
                precision,
                _random_batch(index, micro, image_size, num_classes, device),
                sums,
                window=2 * micro,
                last=index == 1,
                label_smoothing=0.0,
                graphs=None,
                enter=lambda _: None,
            )
        update(
            state,
            strategy,
            lr=0.0,
            clip=1.0,
            num_micro_batches=2,
            leave_out=False,
            check_loss=None,
        )
        if device.type != "cuda":
            return True
        torch.cuda.synchronize(device)
        free, total = torch.cuda.mem_get_info(device)
        return free >= _SPARE * total
    except RuntimeError as exc:  # OutOfMemoryError is one; cuBLAS and NCCL have their own
        if not any(word in str(exc) for word in _NO_MEMORY):
            raise
        return False
    finally:
        state.optimizer.zero_grad(set_to_none=True)


def _random_batch(
    index: int, micro: int, image_size: int, num_classes: int, device: torch.device
) -> Batch:
    ids = np.arange(micro, dtype=np.int64)
    return Batch(
        images=torch.randn(micro, 3, image_size, image_size, device=device),
        targets=torch.rand(micro, num_classes, device=device).softmax(1),
        weights=torch.ones(micro, device=device),
        seeds=torch.from_numpy(ids).to(device),
        seeds_host=ids,
        ids=ids,
        slice=MicroSlice(start=0, stop=micro, index=index),
    )
