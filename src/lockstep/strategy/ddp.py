"""Data parallelism: every process holds the model, gradients are averaged.

``reduce=backward`` is torch's DistributedDataParallel, which sends a bucket of gradients while the
backward pass makes the next. It splits what a compiler may fuse at each bucket, and a pass with
sends in it cannot be recorded. ``reduce=after`` keeps the pass whole and sends all gradients at its
end, when nothing is left to hide that behind: for links that are quick beside the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import dist
from lockstep.models.deferred import fill
from lockstep.strategy.base import Strategy

# torch 2.14 renamed the argument.
_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)


class DDPStrategy(Strategy):
    """Li et al. 2020, "PyTorch Distributed" (arXiv:2006.15704)."""

    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        model = fill(self._sync_batchnorm(model), device).to(device)
        self._module: nn.Module = model
        if self._reduces_after:
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast_(tensor.detach())
        elif dist.is_distributed():
            # Statistics are partial sums (models/batchnorm.py): rank 0's must not overwrite.
            options: dict[str, Any] = {_BUFFERS: False}
            self._module = DistributedDataParallel(
                model,
                device_ids=[device.index] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                # A static graph learns its hooks in the first backward pass, which no_sync skips.
                static_graph=self.cfg.static_graph and self.accumulation == 1,
                bucket_cap_mb=self.cfg.bucket_mb,
                **options,
            )
        return self._module

    @property
    def _reduces_after(self) -> bool:
        return self.cfg.reduce == "after"

    @property
    def loss_factor(self) -> float:
        # Sums are sums; DistributedDataParallel divides them.
        return 1.0 if self._reduces_after else super().loss_factor

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._reduces_after:
            dist.all_reduce_sums_([p.grad for p in parameters if p.grad is not None])

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        if last or not isinstance(self._module, DistributedDataParallel):
            return nullcontext()
        return self._module.no_sync()
