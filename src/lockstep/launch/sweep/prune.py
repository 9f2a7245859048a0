"""How well a run does, from its ``metrics.jsonl`` alone, and whether it is worth going on. Level 7.

The rule of stopping is that of Golovin et al. 2017, "Google Vizier", section 3.2.2: a trial ends
when its best result is worse than the median of what the others had reached at the same step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from lockstep.config.schema import Sweep
from lockstep.telemetry.files import read_records

FIGURES = ("step", "top1", "top5", "loss")
"""What a ledger keeps of an evaluation."""


def result(run_dir: Path) -> dict[str, float]:
    """The figures of the run's last evaluation: of ``DONE`` if it is there; empty if none was."""
    try:
        summary = json.loads((run_dir / "DONE").read_text())
        return {key: summary[key] for key in FIGURES if math.isfinite(summary.get(key, math.nan))}
    except (OSError, ValueError, TypeError):
        return next(reversed(evaluations(run_dir)), {})


def evaluations(run_dir: Path) -> list[dict[str, float]]:
    """The figures of each evaluation, in order; of averaged weights where there are any."""
    by_step: dict[int, dict[str, float]] = {}
    try:
        for record in read_records(run_dir / "metrics.jsonl"):
            if record["kind"] == "eval" and None not in (record["top1"], record["loss"]):
                # The averaged weights' record follows that of the raw ones.
                by_step[record["step"]] = {key: record[key] for key in FIGURES}
    except (OSError, KeyError):
        pass
    return [by_step[step] for step in sorted(by_step)]


def is_poor(run_dir: Path, others: Iterable[Path], rule: Sweep) -> bool:
    """Whether the run shall be stopped: worse than a share of the others at the same step."""
    assert rule.prune is not None
    mine = evaluations(run_dir)
    if not mine or (step := mine[-1]["step"]) < rule.prune_from * _total_steps(run_dir):
        return False
    pasts = filter(None, map(evaluations, others))
    theirs = [past for past in pasts if past[0]["step"] <= step <= past[-1]["step"]]
    if len(theirs) < rule.prune_after:
        return False
    bests = sorted(_best(past, step, rule.metric) for past in theirs)
    return _best(mine, step, rule.metric) < bests[math.ceil(rule.prune * len(bests)) - 1]


def lower_is_better(metric: str) -> bool:
    """Which way a metric goes."""
    return metric == "loss"


def _best(past: Sequence[dict[str, float]], step: float, metric: str) -> float:
    """The best figure up to a step, turned so that higher is better."""
    sign = -1.0 if lower_is_better(metric) else 1.0
    return max(sign * figures[metric] for figures in past if figures["step"] <= step)


def _total_steps(run_dir: Path) -> float:
    try:
        return float(json.loads((run_dir / "plan.json").read_text())["total_steps"])
    except (OSError, ValueError, KeyError):
        return math.inf
