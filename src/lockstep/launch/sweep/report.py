"""A sweep in figures: the table, ``sweep.csv`` and ``sweep.png``. Level 7."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.door import aligned
from lockstep.durable import atomic_write
from lockstep.launch.sweep.ledger import Entry
from lockstep.launch.sweep.prune import FIGURES, lower_is_better

_COLUMNS = 3
"""Of the picture."""


def write_reports(folder: Path | None, entries: Sequence[Entry], metric: str) -> str:
    """Write ``sweep.csv`` and ``sweep.png`` below ``folder``; returns the table for people.

    Args:
        folder: of the sweep; None if no job could have run.
        metric: by which the jobs are sorted, the best first.
    """
    entries = sorted(entries, key=lambda entry: _rank(entry, metric))
    keys = varied_keys(entries)
    lines = [_table(entries, keys, metric)]
    if folder is not None:
        atomic_write(folder / "sweep.csv", _csv(entries, keys).encode())
        lines.append(f"\n{folder / 'sweep.csv'}")
        lines.append(_picture(folder / "sweep.png", entries, keys, metric))
    return "\n".join(lines)


def one_line(entry: Entry, metric: str) -> str:
    """State, metric and time of a job."""
    parts: list[str] = [entry.state]
    if entry.state == "failed":
        parts = [f"failed with exit code {entry.exit_code}"]
    if metric in entry.metrics:
        parts.append(f"{metric} {_shown(entry, metric)}")
    return ", ".join([*parts, f"{entry.seconds:.0f} s"])


def varied_keys(entries: Sequence[Entry]) -> list[str]:
    """The keys in which the jobs differ, in the order of the command."""
    return list(dict.fromkeys(key for entry in entries for key in entry.varied))


def _rank(entry: Entry, metric: str) -> tuple[bool, float, str]:
    """For sorting: the best first, those without a result last."""
    value = entry.metrics.get(metric)
    if value is None:
        return True, 0.0, entry.run
    return False, value if lower_is_better(metric) else -value, entry.run


def _shown(entry: Entry, metric: str) -> str:
    value = entry.metrics.get(metric)
    return "-" if value is None else f"{value:.4f}" if metric == "loss" else f"{value:.2f}"


def _table(entries: Sequence[Entry], keys: Sequence[str], metric: str) -> str:
    rows = [[metric, "state", "exit", *keys, "run"]]
    for entry in entries:
        code = "-" if entry.exit_code is None else str(entry.exit_code)
        values = [entry.varied.get(key, "") for key in keys]
        rows.append([_shown(entry, metric), entry.state, code, *values, entry.run_dir])
    return "\n".join(aligned(rows))


def _csv(entries: Sequence[Entry], keys: Sequence[str]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        ["run", *keys, "state", "exit_code", "attempts", "seconds", *FIGURES, "fingerprint"]
    )
    for entry in entries:
        writer.writerow(
            [
                entry.run_dir or entry.run,
                *(entry.varied.get(key, "") for key in keys),
                entry.state,
                "" if entry.exit_code is None else entry.exit_code,
                entry.attempts,
                f"{entry.seconds:.1f}",
                *(entry.metrics.get(figure, "") for figure in FIGURES),
                entry.fingerprint,
            ]
        )
    return out.getvalue()


def _picture(path: Path, entries: Sequence[Entry], keys: Sequence[str], metric: str) -> str:
    """Draw the metric against each key that varies; returns what to tell."""
    shown = [entry for entry in entries if metric in entry.metrics]
    keys = [key for key in keys if len({entry.varied.get(key) for entry in shown}) > 1]
    if not shown or not keys:
        return "no picture: fewer than two values of a key have a result"
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: pip install -e '.[sweep]' brings matplotlib"
    columns = min(_COLUMNS, len(keys))
    rows = math.ceil(len(keys) / columns)
    figure = Figure(figsize=(1 + 4.5 * columns, 0.6 + 3.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for i, key in enumerate(keys):
        _draw(figure.add_subplot(rows, columns, i + 1), shown, key, metric)
    figure.suptitle(f"{path.parent.name}: {len(shown)} runs", fontsize=10)
    if any(entry.state != "done" for entry in shown):
        # Of the last plot, and below all of them: the same marks everywhere, and none is covered.
        handles = figure.axes[-1].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=3, fontsize=9)
    partial = path.with_name(f".{path.name}.tmp.png")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
    return str(path)


def _draw(axes: Any, entries: Sequence[Entry], key: str, metric: str) -> None:
    values = [entry.varied.get(key, "") for entry in entries]
    numbers = [_number(value) for value in values]
    names = sorted(set(values), key=lambda v: (_number(v) is None, _number(v) or 0.0, v))
    finite = [n for n in numbers if n is not None]
    scales = len(finite) == len(values) and len(set(finite)) > 1
    places = finite if scales else [float(names.index(value)) for value in values]
    if scales and min(finite) > 0 and max(finite) / min(finite) >= 20:
        axes.set_xscale("log")
    for state, marker, colour in (("done", "o", "C0"), ("pruned", "x", "C1"), (None, "+", "C3")):
        here = [
            (place, entry.metrics[metric])
            for place, entry in zip(places, entries, strict=True)
            if entry.state == state or (state is None and entry.state not in ("done", "pruned"))
        ]
        if here:
            label = state or "not finished"
            axes.scatter(*zip(*here, strict=True), marker=marker, c=colour, alpha=0.7, label=label)
    if not scales or len(names) <= 6:
        ticks = [_number(name) or 0.0 for name in names] if scales else range(len(names))
        axes.set_xticks(list(ticks), [_shortened(name) for name in names])
        axes.minorticks_off()
        axes.tick_params(axis="x", labelrotation=15 if max(map(len, names)) > 8 else 0)
    if not scales:
        axes.set_xlim(-0.5, len(names) - 0.5)
    axes.set_xlabel(key)
    axes.set_ylabel(metric + (" (%)" if metric.startswith("top") else ""))
    axes.grid(alpha=0.3)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _shortened(name: str) -> str:
    number = _number(name)
    if number is not None and len(name) > 8:
        return f"{number:.3g}"
    return name if len(name) <= 20 else f"{name[:8]}...{name[-9:]}"
