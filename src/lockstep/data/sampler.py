"""Who takes which sample when: pure functions without state. Level 2, numpy alone.

The sampler's whole state is ``(epoch, samples consumed)``: everything else follows from the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class MicroSlice:
    """Positions [start, stop) of an epoch's order that one process takes in one forward pass.

    An empty slice is a dummy that a process runs only so that collectives match.
    """

    start: int
    stop: int
    index: int
    """Number of the micro-batch within its window, counted over all ranks."""


GROUP_BLOCKS = 256
"""Blocks that are shuffled together."""


def epoch_order(seed: int, epoch: int, num_samples: int, *, block: int = 1) -> np.ndarray:
    """The sample index at each position of an epoch, [num_samples] int64.

    Args:
        block: 1: any sample anywhere. More: so many neighbours stay close, for disks that are slow
            at reading here and there: blocks come in random order, and the samples of
            :data:`GROUP_BLOCKS` of them at a time are shuffled.
    """
    # Raw bits, sorted: numpy keeps those streams for ever, but not that of Generator.permutation.
    stream = np.random.Philox(key=[seed & _MASK, epoch & _MASK])
    bits = stream.random_raw(num_samples)
    if block == 1:
        return np.argsort(bits, kind="stable").astype(np.int64)
    of = np.arange(num_samples) // block
    blocks = np.argsort(stream.random_raw(-(-num_samples // block)), kind="stable")
    place = np.empty_like(blocks)
    place[blocks] = np.arange(len(blocks))
    # By group first, by chance within it.
    return np.lexsort((bits, place[of] // GROUP_BLOCKS)).astype(np.int64)


def sample_seeds(
    seed: int, epoch: int, indices: np.ndarray | Sequence[int], *, stream: int = 0
) -> np.ndarray:
    """One seed per sample, whoever asks: a hash of (seed, epoch, sample index).

    SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number generators").

    Args:
        indices: [n] integers.
        stream: seeds of another stream have nothing to do with these.

    Returns:
        [n] int64, 63 bits, not negative.
    """
    key = np.zeros(1, dtype=np.uint64)
    for word in (seed, epoch, stream):
        key = _scramble(key + np.uint64(word & _MASK))
    keys = np.asarray(indices, dtype=np.int64).astype(np.uint64) * np.uint64(_GOLDEN)
    return (_scramble(key + keys) >> np.uint64(1)).astype(np.int64)


def window_slices(
    start: int, stop: int, micro: int | None, rank: int, world: int
) -> list[MicroSlice]:
    """This rank's forward passes of one window (an optimiser step's samples, or an evaluation).

    With ``micro`` the window is cut into the same chunks at any world size, the last one shorter,
    and chunk k goes to rank ``k % world``; without, each rank takes one slice and sizes differ by
    at most one. All ranks get equally many slices; those with nothing to do get empty ones.
    """
    assert 0 <= start < stop and 0 <= rank < world and (micro is None or micro > 0)
    if micro is None:
        share, rest = divmod(stop - start, world)
        first = start + rank * share + min(rank, rest)
        return [MicroSlice(first, first + share + (rank < rest), rank)]
    rounds = -(-num_micro_batches(start, stop, micro, world) // world)
    chunks = range(rank, rounds * world, world)
    bounds = [(k, min(start + k * micro, stop)) for k in chunks]
    return [MicroSlice(first, min(first + micro, stop), k) for k, first in bounds]


def num_micro_batches(start: int, stop: int, micro: int | None, world: int) -> int:
    """Non-empty slices of a window over all ranks."""
    count = stop - start
    return min(count, world) if micro is None else -(-count // micro)


def _scramble(bits: np.ndarray) -> np.ndarray:
    bits = bits + np.uint64(_GOLDEN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits
