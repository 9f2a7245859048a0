"""BatchNorm running statistics that are the same at every world size.

A running statistic is linear in the batch statistics: after T micro-batches it is
``(1-m)^T R_0 + sum_t m (1-m)^(T-1-t) s_t``. So each rank keeps a partial sum over the micro-batches
it computed, decayed for those it did not, and the sum over ranks is exactly what one process that
saw all micro-batches in order would hold. Nothing is communicated until the value is needed
(evaluation, save). DDP's way, keeping rank 0's buffers, throws the other ranks' statistics away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep import dist


class RunningStatistics:
    """The running means and variances of a model, as this rank's partial sums.

    SyncBatchNorm layers are left alone: their statistics are the same on every rank already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [
            m
            for m in model.modules()
            if isinstance(m, _BatchNorm)
            and not isinstance(m, nn.SyncBatchNorm)
            and m.track_running_stats
            and m.momentum is not None
        ]
        self._by_momentum: dict[float, list[torch.Tensor]] = {}
        for layer in self._layers:
            assert layer.momentum is not None
            self._by_momentum.setdefault(layer.momentum, []).extend(_buffers(layer))
        self._done = 0
        """Micro-batches of the current window that the partial sums account for."""
        self._before: list[torch.Tensor] = []

    @property
    def buffers(self) -> list[torch.Tensor]:
        return [b for layer in self._layers for b in _buffers(layer)]

    def before_micro_batch(self, index: int) -> None:
        """Account for the micro-batches of the window that other ranks compute before ``index``."""
        self._decay(index - self._done)
        self._done = index + 1

    def end_window(self, num_micro_batches: int) -> None:
        """Account for the rest of the window."""
        self._decay(num_micro_batches - self._done)
        self._done = 0

    def remember(self) -> None:
        """Call before a window that may be undone."""
        self._before = [buffer.clone() for buffer in self.buffers]

    def undo_window(self) -> None:
        """Be as :meth:`remember` has found the statistics."""
        if self._before:
            torch._foreach_copy_(self.buffers, self._before)
        self._done = 0

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """A forward pass within leaves the statistics as they are (a dummy micro-batch)."""
        with frozen(self._layers):
            yield

    @contextmanager
    def whole(self, extra: Sequence[torch.Tensor] = ()) -> Iterator[None]:
        """Within, every rank holds the whole statistics; afterwards equal partial sums of them.

        Args:
            extra: further partial sums to treat alike (the EMA's). All ranks enter here.
        """
        tensors = [*self.buffers, *extra]
        _sum_over_ranks(tensors)
        try:
            yield
        finally:
            self.split(tensors)

    def split(self, tensors: Sequence[torch.Tensor]) -> None:
        """Turn whole statistics into equal partial sums of the ranks."""
        if tensors and dist.world_size() > 1:
            torch._foreach_div_(list(tensors), dist.world_size())

    def set_batches_tracked(self, count: int) -> None:
        """``num_batches_tracked`` as one process would count; only a record, nothing reads it."""
        for layer in self._layers:
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(count)

    def _decay(self, missed: int) -> None:
        assert missed >= 0, "micro-batches come in order"
        if missed:
            for momentum, buffers in self._by_momentum.items():
                torch._foreach_mul_(buffers, (1.0 - momentum) ** missed)


@contextmanager
def frozen(layers: Sequence[_BatchNorm]) -> Iterator[None]:
    """A forward pass within leaves the running statistics of ``layers`` as they are."""
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 0.0
    try:
        yield
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum


def _buffers(layer: _BatchNorm) -> list[torch.Tensor]:
    return [b for b in (layer.running_mean, layer.running_var) if b is not None]


def _sum_over_ranks(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors or dist.world_size() == 1:
        return
    flat = dist.all_reduce_sum_(torch.cat([t.flatten() for t in tensors]))
    offset = 0
    for t in tensors:
        t.copy_(flat[offset : offset + t.numel()].view_as(t))
        offset += t.numel()
