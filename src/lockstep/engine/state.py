"""Everything that a checkpoint holds, in one place."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from lockstep.models.batchnorm import RunningStatistics
from lockstep.optim.ema import WeightAverage
from lockstep.strategy.precision import LossScaler

Tensors = dict[str, dict[str, torch.Tensor]]


@dataclass
class Progress:
    """How far the run is. The sampler's whole state is (epoch, consumed)."""

    step: int = 0
    """Optimiser steps done."""
    epoch: int = 0
    consumed: int = 0
    """Samples of the current epoch that are done."""
    samples_seen: int = 0
    micro_batches: int = 0
    best_top1: float | None = None
    best_step: int | None = None


@dataclass
class TrainState:
    """What changes while training.

    ``model`` owns the parameters under timm's names; ``module`` is what is called (DDP wraps it).
    """

    model: nn.Module
    module: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    statistics: RunningStatistics
    ema: WeightAverage | None
    progress: Progress

    def tensors(self) -> Tensors:
        """Tensors to save, or to load into: canonical names, each rank's shards.

        All ranks enter here. An optimiser that has not stepped yet is given its state first.
        """
        optimizer = get_optimizer_state_dict(
            self.model,
            self.optimizer,
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        tensors: Tensors = {
            "model": dict(get_model_state_dict(self.model)),
            # Numbers of the groups (lr, betas) follow from the configuration: only state is kept.
            "optimizer": {k: v for k, v in optimizer.items() if isinstance(v, torch.Tensor)},
        }
        if self.ema is not None:
            tensors["ema"] = dict(self.ema.shadow)
        return tensors

    def meta(self) -> dict[str, Any]:
        """Plain values to save."""
        return {"progress": asdict(self.progress), "scaler": self.scaler.state()}

    def adopt(self, tensors: Tensors, meta: dict[str, Any]) -> None:
        """Take over what was loaded into ``tensors()``. All ranks enter here."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        current = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        set_optimizer_state_dict(
            self.model, self.optimizer, {**current, **tensors["optimizer"]}, options=options
        )
        self.model.load_state_dict(tensors["model"])
        self.statistics.split(self.statistics.buffers)
        if self.ema is not None:
            for name, shadow in self.ema.shadow.items():
                shadow.copy_(tensors["ema"][name])
            self.statistics.split(self.ema.buffers)
        self.scaler.load(meta["scaler"])
        self.progress = Progress(**meta["progress"])
