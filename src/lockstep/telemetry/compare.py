"""Whether two run folders hold the same run, judged by what they recorded.

The law of their configurations, then ``metrics.jsonl`` in the order of training, then the exported
weights; the first difference is the finding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.config.bind import law, load_config
from lockstep.errors import UserError
from lockstep.telemetry.files import read_records
from lockstep.telemetry.records import Record

EXACT = ("epoch", "samples_seen", "sample_digest")
CLOSE = ("lr", "loss", "grad_norm")
WEIGHTS = "model.safetensors"

_Steps = dict[int, Record]
_Evaluations = dict[tuple[int, str], Record]


@dataclass(frozen=True)
class Comparison:
    """What comparing two runs found."""

    num_steps: int
    """Steps that agree, from the first one on."""
    largest_loss_difference: float
    """Relative, over these steps."""
    parting: str | None
    """The first difference: where, of what, by how much; None: the same run."""
    same_samples: bool = False
    """Whether all steps of both have the same samples, also after they part."""

    def text(self) -> str:
        """The finding in a sentence or two."""
        agreed = (
            f"{self.num_steps:,} steps, largest relative loss difference "
            f"{self.largest_loss_difference:.2g}"
        )
        if self.parting is None:
            return f"same run: {agreed}"
        before = f"\nthey agree before it: {agreed}" if self.num_steps else ""
        samples = (
            "\nall steps of both have the same samples: other processes or another strategy round "
            "in another order, which begins at 1e-7 and grows as training goes on"
        )
        return f"different runs: {self.parting}{before}{samples if self.same_samples else ''}"


def compare_runs(a: Path, b: Path, *, tolerance: float) -> Comparison:
    """Compare two run folders.

    Losses, gradient norms and weights may differ by ``tolerance``, relative to the larger one, and
    so many of all evaluated samples may have another verdict; 0 asks for bits. Sample ids and
    counts are exact. What only one folder has because of keys that are no law (an evaluation at another
    interval) is not compared.

    Raises:
        UserError: a folder holds no run, or no steps.
    """
    laws = [law(load_config(_inside(run, "config.yaml"))) for run in (a, b)]
    (steps_a, evaluations_a), (steps_b, evaluations_b) = _records(a), _records(b)
    if differing := _law_lines(*laws):
        return Comparison(0, 0.0, "\n".join(["their configurations:", *differing]))
    same = steps_a.keys() == steps_b.keys() and not any(
        _samples_problem(steps_a[step], steps_b[step]) for step in steps_a
    )
    num_steps, largest = 0, 0.0
    for step in sorted(steps_a.keys() | steps_b.keys()):
        if step not in steps_a or step not in steps_b:
            where, absent = (a, b) if step in steps_a else (b, a)
            return Comparison(num_steps, largest, f"step {step} is in {where}, not in {absent}")
        problem = _step_problem(steps_a[step], steps_b[step], tolerance)
        if problem is None:
            num_steps += 1
            largest = max(largest, difference(steps_a[step]["loss"], steps_b[step]["loss"]))
            problem = _evaluation_problem(step, evaluations_a, evaluations_b, tolerance)
        if problem is not None:
            return Comparison(num_steps, largest, f"step {step}: {problem}", same)
    problem = _weights_problem(a / WEIGHTS, b / WEIGHTS, tolerance)
    return Comparison(num_steps, largest, problem, same)


def difference(a: float | None, b: float | None) -> float:
    """|a - b| relative to the larger of them; null stands for any non-finite figure."""
    if a is None or b is None:
        return 0.0 if a is b else math.inf
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def _inside(run: Path, name: str) -> Path:
    if not (run / name).is_file():
        what = f"holds no {name}" if run.is_dir() else "no such folder"
        raise UserError(f"{run}: {what}; give two run folders, as runs/NAME")
    return run / name


def _records(run: Path) -> tuple[_Steps, _Evaluations]:
    steps: _Steps = {}
    evaluations: _Evaluations = {}
    for record in read_records(_inside(run, "metrics.jsonl")):
        if record["kind"] == "step":
            steps[record["step"]] = record
        elif record["kind"] == "eval":
            evaluations[record["step"], record["weights"]] = record
    if not steps:
        raise UserError(f"{run}: metrics.jsonl holds no steps yet; train it first")
    return steps, evaluations


def _law_lines(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    absent = "(absent)"
    return [
        f"  {key}: {a.get(key, absent)} and {b.get(key, absent)}"
        for key in sorted(a.keys() | b.keys())
        if a.get(key, absent) != b.get(key, absent)
    ]


def _step_problem(a: Record, b: Record, tolerance: float) -> str | None:
    return _samples_problem(a, b) or _first(*(_close(key, a, b, tolerance) for key in CLOSE))


def _samples_problem(a: Record, b: Record) -> str | None:
    return _first(*(_exact(key, a, b) for key in EXACT))


def _evaluation_problem(
    step: int, a: _Evaluations, b: _Evaluations, tolerance: float
) -> str | None:
    for key in sorted(a.keys() & b.keys()):
        if key[0] != step:
            continue
        one, other = a[key], b[key]
        problem = _first(
            _exact("count", one, other),
            _close("loss", one, other, tolerance),
            *(_hits(rank, one, other, tolerance) for rank in ("top1", "top5")),
        )
        if problem is not None:
            return f"evaluation of the {key[1]} weights: {problem}"
    return None


def _exact(key: str, a: Record, b: Record) -> str | None:
    same = a.get(key) == b.get(key)
    return None if same else f"{key} {a.get(key)} and {b.get(key)}"


def _close(key: str, a: Record, b: Record, tolerance: float) -> str | None:
    one, other = a.get(key), b.get(key)
    if (off := difference(one, other)) <= tolerance:
        return None
    return f"{key} {one} and {other} differ by {off:.2g} (tolerance {tolerance:g})"


def _hits(key: str, a: Record, b: Record, tolerance: float) -> str | None:
    """A sample between two classes may fall to either side: hits are compared as counts."""
    hits = [round(record[key] * record["count"] / 100) for record in (a, b)]
    allowed = math.ceil(tolerance * a["count"])
    if abs(hits[0] - hits[1]) <= allowed:
        return None
    return (
        f"{key} {a[key]:.4f} % and {b[key]:.4f} %, {abs(hits[0] - hits[1])} of {a['count']} "
        f"samples (tolerance {allowed})"
    )


def _weights_problem(a: Path, b: Path, tolerance: float) -> str | None:
    """Of the final weights where both runs are finished, relative to the norm of all of them."""
    if not a.is_file() or not b.is_file():
        return None
    try:
        with safe_open(a, "pt") as one, safe_open(b, "pt") as other:
            if differing := sorted(set(one.keys()) ^ set(other.keys())):
                return f"final weights: only one of them has {differing[0]}"
            squared_off = squared = 0.0
            for name in one.keys():  # noqa: SIM118 (a safe_open is no mapping)
                x, y = one.get_tensor(name), other.get_tensor(name)
                if x.shape != y.shape:
                    return f"final weights: {name} is {list(x.shape)} and {list(y.shape)}"
                if not x.is_floating_point():
                    continue  # BatchNorm's counters: large, and without effect
                x, y = x.double(), y.double()
                squared_off += (x - y).square().sum().item()
                squared += torch.maximum(x.abs(), y.abs()).square().sum().item()
    except (OSError, SafetensorError) as exc:
        raise UserError(f"{a} or {b} cannot be read: {exc}; export the runs again") from exc
    off = math.sqrt(squared_off / squared) if squared else 0.0
    if off <= tolerance:
        return None
    return f"final weights differ by {off:.2g} of their norm (tolerance {tolerance:g})"


def _first(*problems: str | None) -> str | None:
    return next((problem for problem in problems if problem is not None), None)
