"""Everything that a checkpoint holds, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep import dist
from lockstep.checkpoint.shards import Tensors
from lockstep.models.batchnorm import RunningStatistics
from lockstep.optim.ema import WeightAverage
from lockstep.strategy.precision import LossScaler

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


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
    evaluated_step: int = -1
    """Optimiser steps done when the last evaluation ended."""
    skipped_steps: list[int] = field(default_factory=list)
    """Steps whose updates are left out because a rollback said so."""
    recent_losses: list[float] = field(default_factory=list)
    """By which a spike is measured (``guard.spike``)."""


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
        """Tensors to load into: canonical names, each rank's shards.

        All ranks enter here. An optimiser that has not stepped yet is given its state first, which
        counts a step: see :meth:`to_save`.
        """
        if not self.optimizer.state:
            self._flat_optimizer()
        tensors: Tensors = {
            "model": self.model.state_dict(),
            "optimizer": self._optimizer_tensors(),
        }
        if self.ema is not None:
            tensors["ema"] = dict(self.ema.shadow)
        return tensors

    def to_save(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, with the same names at every step, and plain values. All ranks enter here.

        Nothing changes: an optimiser all of whose updates were left out stays one that has not
        stepped, here and where it is loaded.
        """
        begun = bool(self.optimizer.state)
        meta = {
            "progress": asdict(self.progress),
            "scaler": self.scaler.state(),
            "optimizer": self._optimizer_numbers() | {"begun": begun},
        }
        with nullcontext() if begun else self._undoing_a_step():
            return self.tensors(), meta

    @contextmanager
    def _undoing_a_step(self) -> Iterator[None]:
        """torch makes an optimiser's state by a step of zeros, which some take for a real one."""
        groups = [dict(group) for group in self.optimizer.param_groups]
        parameters = [dist.local_part(p) for group in groups for p in group["params"]]
        values = [parameter.detach().clone() for parameter in parameters]
        yield
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)
        for group, before in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(before)
        self.optimizer.state.clear()

    def adopt(self, tensors: Tensors, meta: dict[str, Any]) -> None:
        """Take over what was loaded into ``tensors()``. All ranks enter here."""
        flat = self._flat_optimizer()
        # Parts of a quantised tensor have been loaded in place.
        flat |= {k: v for k, v in tensors["optimizer"].items() if k in flat}
        set_optimizer_state_dict(self.model, self.optimizer, flat, options=_FLAT)
        if not meta["optimizer"].get("begun", True):
            self.optimizer.state.clear()
        self._adopt_optimizer_numbers(meta["optimizer"])
        self.model.load_state_dict(tensors["model"])
        self.statistics.split(self.statistics.buffers)
        if self.ema is not None:
            for name, shadow in self.ema.shadow.items():
                shadow.copy_(tensors["ema"][name])
            self.statistics.split(self.ema.buffers)
        self.scaler.load(meta["scaler"])
        self.progress = Progress(**meta["progress"])

    def _flat_optimizer(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of ``_flat_optimizer``, which takes half of a fast step: training waits."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        states = {f"state.{name}": self.optimizer.state.get(p, {}) for p, name in names.items()}
        groups = {
            f"param_groups.{names[parameter]}": group
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        }
        return {
            name: tensor
            for owner, values in (states | groups).items()
            for key, value in values.items()
            if isinstance(value, torch.Tensor)
            for name, tensor in _plain(f"{owner}.{key}", value)
        }

    def _optimizer_numbers(self) -> dict[str, Any]:
        """What optimisers keep beside tensors: step counts, most of all."""
        states = {
            name: numbers
            for name, parameter in self.model.named_parameters()
            if (numbers := _numbers(self.optimizer.state.get(parameter, {})))
        }
        groups = [_no_flags(_numbers(group)) for group in self.optimizer.param_groups]
        return {"state": states, "groups": groups}

    def _adopt_optimizer_numbers(self, numbers: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, values in numbers["state"].items():
            self.optimizer.state[parameters[name]].update(values)
        for group, values in zip(self.optimizer.param_groups, numbers["groups"], strict=True):
            group.update(_no_flags(values))  # of older checkpoints


def _plain(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The tensor, or what a quantised one is made of: checkpoints hold plain types only."""
    if isinstance(tensor, DTensor) or not is_traceable_wrapper_subclass(tensor):
        return [(name, tensor)]
    parts, _ = tensor.__tensor_flatten__()
    return [(f"{name}.{part}", getattr(tensor, part)) for part in parts]


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in values.items() if isinstance(v, int | float)}


def _no_flags(numbers: dict[str, Any]) -> dict[str, Any]:
    """Which kernel updates (``fused``) follows from the configuration and the device."""
    return {k: v for k, v in numbers.items() if not isinstance(v, bool)}
