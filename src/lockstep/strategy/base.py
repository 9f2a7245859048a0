"""What the engine needs of a strategy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from timm.layers import convert_sync_batchnorm
from torch import nn

from lockstep import dist
from lockstep.config.schema import Precision
from lockstep.config.schema import Strategy as StrategyConfig


class Strategy(ABC):
    """One way of sharing an optimiser step.

    The engine calls ``prepare`` once, then for each micro-batch a forward and a backward pass
    within ``micro_batch(last=...)``. What averages gradients over ranks is undone: the engine
    multiplies the loss by ``loss_factor`` to get their sum: with per-sample losses
    divided by the global count, that sum is the exact gradient whatever the slices.
    """

    materialises_meta: ClassVar[bool] = False
    """Whether ``prepare`` takes a model whose parameters are on the meta device."""
    sends_in_pass: ClassVar[bool] = False
    """Whether forward and backward pass, where they can be recorded, send to other ranks."""

    def __init__(
        self,
        cfg: StrategyConfig,
        precision: Precision,
        *,
        shard_processes: int,
        accumulation: int,
        recorded: bool,
    ) -> None:
        """
        Args:
            shard_processes: processes that share one copy of the model.
            accumulation: micro-batches of one process in a full optimiser step.
            recorded: passes become CUDA graphs.
        """
        self.cfg = cfg
        self.precision = precision
        self.shard_processes = shard_processes
        self.accumulation = accumulation
        self.recorded = recorded

    @abstractmethod
    def prepare(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Move and wrap ``model``; returns the module to call. All ranks enter here.

        The model passed in stays the owner of the parameters, under the same names.
        """

    @property
    def loss_factor(self) -> float:
        return float(dist.world_size())

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Context of one forward and backward pass; gradients need to be whole after the last."""
        return nullcontext()

    def reduce_gradients(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: B027
        """Reduce over ranks what the backward passes have left to this moment. All ranks enter here."""

    def after_evaluation(self) -> None:  # noqa: B027 - most have nothing to undo
        """Undo what forward passes without a backward pass leave behind."""

    def grad_norm(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
        """Global L2 norm of the gradients, a 0-d float32 tensor, the same on every rank."""
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        # FSDP: the norm is a DTensor of partial sums; all ranks enter the reduction.
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def _sync_batchnorm(self, model: nn.Module) -> nn.Module:
        # timm's: torch's would lose the activation that timm's BatchNormAct2d holds.
        return convert_sync_batchnorm(model) if self.cfg.sync_batchnorm else model
