"""Level 3: how processes share the work of one optimiser step."""

from __future__ import annotations

from lockstep.config.schema import Precision
from lockstep.config.schema import Strategy as StrategyConfig
from lockstep.strategy.base import Strategy
from lockstep.strategy.ddp import DDPStrategy
from lockstep.strategy.fsdp import FSDPStrategy
from lockstep.strategy.single import DataParallelStrategy, SingleStrategy

STRATEGIES: dict[str, type[Strategy]] = {
    "single": SingleStrategy,
    "dp": DataParallelStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "hsdp": FSDPStrategy,
}


def build_strategy(
    name: str,
    cfg: StrategyConfig,
    precision: Precision,
    *,
    shard_processes: int,
    accumulation: int,
    recorded: bool,
) -> Strategy:
    """The strategy that the plan resolved ``name`` to."""
    return STRATEGIES[name](
        cfg,
        precision,
        shard_processes=shard_processes,
        accumulation=accumulation,
        recorded=recorded,
    )


__all__ = ["STRATEGIES", "Strategy", "build_strategy"]
