"""Exponential moving average of weights, on each rank's own shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from lockstep import dist
from lockstep.config.schema import Ema


class WeightAverage:
    """Shadow copies of the parameters and of the running statistics.

    The latter may be a rank's partial sums: the average is linear, so averaging commutes with
    summing over ranks. A deepcopy of the model fails under FSDP; cloned tensors keep their DTensor
    placements, and the update works on the local shards.
    """

    def __init__(self, model: nn.Module, buffers: Sequence[torch.Tensor], cfg: Ema) -> None:
        self._cfg = cfg
        names = {id(b): n for n, b in model.named_buffers()}
        self._live: dict[str, torch.Tensor] = {
            n: p for n, p in model.named_parameters() if p.requires_grad
        }
        running = ("running_mean", "running_var")
        self._live |= {n: b for n, b in model.named_buffers() if n.rpartition(".")[2] in running}
        self._buffer_names = [names[id(b)] for b in buffers]
        self.shadow = {n: t.detach().clone() for n, t in self._live.items()}

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The shadows of the BatchNorm statistics."""
        return [self.shadow[n] for n in self._buffer_names]

    def decay(self, step: int) -> float:
        """Decay after ``step`` updates; the warm-up is the one of tf.train.ExponentialMovingAverage."""
        if not self._cfg.warmup:
            return self._cfg.decay
        return min(self._cfg.decay, (1.0 + step) / (10.0 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the shadows towards the live values, after the optimiser step number ``step``."""
        torch._foreach_lerp_(
            [dist.local_part(t) for t in self.shadow.values()],
            [dist.local_part(t) for t in self._live.values()],
            1.0 - self.decay(step),
        )

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within, the model holds the averages and the shadows hold the raw values."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, live in self._live.items():
            a, b = dist.local_part(live), dist.local_part(self.shadow[name])
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)
