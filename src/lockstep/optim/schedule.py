"""The learning rate as a pure function of the optimiser step: nothing to step, save or restore."""

from __future__ import annotations

import math

from lockstep.config.schema import Schedule


def learning_rate(
    cfg: Schedule, *, step: int, total_steps: int, warmup_steps: int, peak: float
) -> float:
    """Learning rate of the optimiser step number ``step`` (from 0).

    Linear warm-up from ``warmup_start * peak`` reaches the peak at ``warmup_steps``. Cosine is
    Loshchilov & Hutter 2017 (arXiv:1608.03983) without restarts, from the peak to ``final * peak``
    at the last step.
    """
    if step < warmup_steps:
        return peak * (cfg.warmup_start + (1.0 - cfg.warmup_start) * step / warmup_steps)
    match cfg.name:
        case "constant":
            return peak
        case "step":
            passed = sum(step >= m * total_steps for m in cfg.milestones)
            return peak * cfg.factor**passed
        case "cosine":
            done = (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps)
            cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
            return peak * (cfg.final + (1.0 - cfg.final) * cosine)
