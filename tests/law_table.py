"""The law's table, measured now: ``python -m tests.law_table > docs/results/law_cpu.md``.

Ends with 1 when a cell is another run than its reference.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import timm
import torch

from lockstep.telemetry.compare import Comparison, compare_runs
from tests.law import (
    CELLS,
    CHAINS,
    EPOCHS,
    EXACT,
    GLOBAL,
    LONG,
    MODELS,
    PLACES,
    TRAIN,
    VAL,
    Cell,
    Chain,
    Trainer,
    write_data,
)
from tests.pool import Pool

HEAD = """\
# The same run on one to four processes

Largest relative difference of a step's loss from the run of one process, for every strategy, number of processes,
model and number of forward passes that a process accumulates. fp32 on CPUs, gloo; {train} images of handwritten
digits, {epochs} epochs with a global batch of {batch}, which three and four processes cannot share evenly. RandAugment,
erasing, mixup, cutmix, stochastic depth and the moving average of weights are on. A cell holds a figure when
`compare_runs` says "same run": equal sample digests in every step, losses, gradient norms and final weights within
{exact:g}, all {val} evaluation images counted. One run each.

`python -m tests.law_table`: Python {python}, torch {torch}, timm {timm}, {cores} CPU cores ({machine}).
"""
RESUMED = """
## Interrupted runs

The same comparison for runs that were stopped after steps {stops} of nine, in the middle of epochs, and gone on with by
another strategy on another number of processes each time.
"""


def table(findings: dict[Cell, Comparison]) -> Iterator[str]:
    """Rows are places, columns models and accumulations."""
    columns = [(model, accumulation) for model in MODELS for accumulation in (1, 3)]
    titles = [f"{model}, accumulation {accumulation}" for model, accumulation in columns]
    yield f"| strategy and processes | {' | '.join(titles)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for place in PLACES.values():
        found = (findings.get(Cell(model, place, a)) for model, a in columns)
        yield f"| {place.name} | {' | '.join(map(told, found))} |"
    same = [f for f in findings.values() if f.parting is None]
    worst = max((f.largest_loss_difference for f in same), default=0.0)
    yield f"\n{len(findings)} cells, {len(same)} the same run, largest loss difference {worst:.1e}."


def resume_table(findings: dict[Chain, Comparison]) -> Iterator[str]:
    """Rows are chains."""
    yield RESUMED.format(stops=", ".join(map(str, CHAINS[0].stops)))
    yield "| model | places | largest loss difference |\n|---|---|---|"
    for chain, found in findings.items():
        yield f"| {chain.model} | {', then '.join(chain.places)} | {told(found)} |"


def told(found: Comparison | None) -> str:
    if found is None:
        return "reference"
    return f"{found.largest_loss_difference:.1e}" if found.parting is None else found.parting


def main() -> int:
    """Train every cell and print the table."""
    findings: dict[Cell, Comparison] = {}
    resumed: dict[Chain, Comparison] = {}
    out = os.dup(1)
    os.dup2(2, 1)  # what the trainings print is no part of the table
    pool = Pool()
    with tempfile.TemporaryDirectory() as name:
        trained = Trainer(pool, write_data(Path(name, "data")), Path(name, "runs"))
        for cell in CELLS:
            pair = trained.cell(cell), trained.reference(cell.model, *cell.reference)
            findings[cell] = compare_runs(*pair, tolerance=EXACT)
            print(f"{cell.name}: {findings[cell].text()}", file=sys.stderr)
        for chain in CHAINS:
            pair = trained.chain(chain), trained.reference(chain.model, *LONG)
            resumed[chain] = compare_runs(*pair, tolerance=EXACT)
            print(f"{chain.name}: {resumed[chain].text()}", file=sys.stderr)
    pool.close()
    figures = {"train": TRAIN, "val": VAL, "epochs": EPOCHS, "batch": GLOBAL, "exact": EXACT}
    versions = {"torch": torch.__version__, "timm": timm.__version__}
    here = {"python": platform.python_version(), "machine": platform.machine()}
    head = HEAD.format(**figures, **versions, **here, cores=os.cpu_count())
    with os.fdopen(out, "w") as file:
        print(head, *table(findings), *resume_table(resumed), sep="\n", file=file)
    return int(any(f.parting is not None for f in [*findings.values(), *resumed.values()]))


if __name__ == "__main__":
    sys.exit(main())
