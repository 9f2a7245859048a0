"""Parts of a run for tests of one room: small models, states, batches and sections."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.config.schema import Guard, Optimizer, Precision
from lockstep.config.schema import Strategy as StrategyConfig
from lockstep.data.loader import Batch
from lockstep.data.sampler import MicroSlice
from lockstep.engine.state import Progress, TrainState
from lockstep.models.batchnorm import RunningStatistics
from lockstep.models.stochastic import seed_by_sample
from lockstep.optim.build import build_optimizer
from lockstep.strategy import Strategy, build_strategy
from lockstep.strategy.precision import LossScaler

CPU = torch.device("cpu")


def nowhere(phase: str) -> None:
    """Hears where a step is, and forgets."""


def precision(
    name: str = "fp32", *, scale: float = 1024.0, interval: int = 3, residual: str = "fp32"
) -> Precision:
    return Precision.model_validate(
        {
            "name": name,
            "initial_scale": scale,
            "growth_interval": interval,
            "residual": residual,
        }
    )


def strategy_config(**changes: Any) -> StrategyConfig:
    values: dict[str, Any] = {
        "name": "ddp",
        "shard": "full",
        "shard_processes": None,
        "cpu_offload": False,
        "prefetch": 1,
        "sync_batchnorm": False,
        "reduce": "backward",
        "static_graph": True,
        "bucket_mb": 25.0,
        "meta_init": False,
        "wrap": "block",
    }
    return StrategyConfig(**(values | changes))


def guard_config(**changes: Any) -> Guard:
    values: dict[str, Any] = {
        "nonfinite": "stop",
        "spike": None,
        "max_incidents": 3,
        "straggler": 1.5,
    }
    return Guard(**(values | changes))


def optimizer_config(name: str = "sgd", **changes: Any) -> Optimizer:
    values: dict[str, Any] = {
        "name": name,
        "lr": 0.1,
        "base_batch": None,
        "weight_decay": 0.01,
        "decay_bias_and_norm": False,
        "clip_grad_norm": None,
        "kwargs": {},
    }
    return Optimizer(**(values | changes))


def network(*, batchnorm: bool = False, seed: int = 0) -> nn.Module:
    """Images of 3 x 4 x 4 to five classes; takes ``seeds`` as every model that we build."""
    torch.manual_seed(seed)
    norm = nn.BatchNorm2d(6) if batchnorm else nn.GroupNorm(2, 6)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), norm, nn.GELU(), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 5)
    )
    seed_by_sample(model)
    return model


def state_of(
    model: nn.Module,
    strategy: Strategy | None = None,
    *,
    optimizer: Optimizer | None = None,
    number_format: Precision | None = None,
) -> tuple[TrainState, Strategy]:
    """What the worker builds around a model; by default one process in fp32."""
    strategy = strategy or strategy_of("single", number_format=number_format)
    module = strategy.prepare(model, CPU)
    state = TrainState(
        model=model,
        module=module,
        optimizer=build_optimizer(
            model, optimizer or optimizer_config(), no_decay=set(), fused=False
        ),
        scaler=LossScaler(number_format or precision()),
        statistics=RunningStatistics(model),
        ema=None,
        progress=Progress(),
    )
    return state, strategy


def strategy_of(
    name: str,
    *,
    shard_processes: int = 1,
    accumulation: int = 1,
    number_format: Precision | None = None,
    recorded: bool = False,
    **changes: Any,
) -> Strategy:
    return build_strategy(
        name,
        strategy_config(**changes),
        number_format or precision(),
        shard_processes=shard_processes,
        accumulation=accumulation,
        recorded=recorded,
    )


def batch_of(
    images: torch.Tensor, targets: torch.Tensor, piece: MicroSlice, *, unreadable: int | None = None
) -> Batch:
    """What the loader would make of a slice of these images; sample ids are positions."""
    dummy = piece.start == piece.stop
    first, last = (0, 1) if dummy else (piece.start, piece.stop)
    ids = np.arange(first, last)
    counts = np.zeros(1, bool) if dummy else ids != unreadable
    return Batch(
        images=images[first:last],
        targets=targets[first:last],
        weights=torch.from_numpy(counts.astype(np.float32)),
        seeds=torch.from_numpy(ids),
        seeds_host=ids,
        ids=ids[counts],
        slice=piece,
    )
