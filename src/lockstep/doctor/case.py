"""What the processes of one measured case do.

``python -m lockstep.doctor.case JOB.json`` starts them, through the launcher of every run.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lockstep import dist, worker
from lockstep.config.plan import Plan
from lockstep.config.schema import Config
from lockstep.data.loader import Loader
from lockstep.doctor.clock import Clock, Effort
from lockstep.doctor.peers import PEERS
from lockstep.doctor.synthetic import Measured, SyntheticLoader, ask_between_steps
from lockstep.durable import atomic_write
from lockstep.engine.loop import StopRequest
from lockstep.launch import launch
from lockstep.launch.folder import DONE
from lockstep.launch.process import Job
from lockstep.parent import die_with_parent

LOCKSTEP = "lockstep"
MODULE = "lockstep.doctor.case"
_ORDER = "order.json"
"""Beside the run's folder."""


def order(run_dir: Path, way: str, effort: Effort, *, real: bool = False) -> None:
    """Leave word for the processes of a run of what they are to measure.

    Args:
        real: read and decode the images of ``data.root``.
    """
    told = {"way": way, "real": real} | asdict(effort)
    (run_dir.parent / _ORDER).write_text(json.dumps(told))


def result(run_dir: Path) -> dict[str, Any] | None:
    """What :func:`run` has measured; None: it has not come that far."""
    with suppress(OSError, ValueError):
        return dict(json.loads((run_dir / DONE).read_text()))
    return None


def run(config: Config, plan: Plan, run_dir: Path, stop: StopRequest) -> dict[str, Any]:
    """Measure as one process of the run, and write the result as rank 0: it is what this run was for. All ranks enter here."""
    wanted = json.loads((run_dir.parent / _ORDER).read_text())
    way, real = wanted.pop("way"), wanted.pop("real")
    effort = Effort(**wanted)
    if way == LOCKSTEP:
        figures = _measure_lockstep(config, plan, run_dir, stop, effort, real=real)
    else:
        figures = _measure_peer(config, plan, way, effort)
    if figures is not None:
        atomic_write(run_dir / DONE, json.dumps(figures).encode())
    return {}


def _measure_lockstep(
    config: Config, plan: Plan, run_dir: Path, stop: StopRequest, effort: Effort, *, real: bool
) -> dict[str, Any] | None:
    """The whole worker, on images that cost nothing unless ``real``: all else is what a run does."""
    figures: list[dict[str, Any] | None] = []
    build_loaders = worker.build_loaders

    def loaders(_: Config, __: Plan, device: torch.device) -> tuple[Loader, Loader]:
        clock = Clock(effort, device)

        def enough() -> bool:
            if not clock.tick():
                return False
            figures.append(_figures(clock))  # now: the worker will have left the process group
            return True

        if real:
            train, val = build_loaders(config, plan, device)
            ask_between_steps(train, plan.accumulation, enough)
            return train, val
        loader = SyntheticLoader(config, plan, device, enough)
        return loader, loader

    with patch.object(worker, "build_loaders", loaders), suppress(Measured):
        worker.run(config, plan, run_dir, stop)
    return figures[0]


def _measure_peer(config: Config, plan: Plan, way: str, effort: Effort) -> dict[str, Any] | None:
    device = dist.init(plan.device, 2 * config.launch.timeout_seconds, group_of_one=False)
    step = PEERS[way](config, plan, device)
    clock = Clock(effort, device)
    while not clock.tick():
        step()
    figures = _figures(clock)
    dist.shutdown()
    return figures


def _figures(clock: Clock) -> dict[str, Any] | None:
    """Rank 0's, with the most memory of any rank; None elsewhere. All ranks enter here."""
    mine = clock.result()
    memory = [m for m in dist.gather_objects(mine["memory_bytes"]) if m is not None]
    return mine | {"memory_bytes": max(memory, default=None)} if dist.is_main() else None


def main(job_file: Path) -> int:
    """Entry point of the process that a benchmark starts; returns the exit code."""
    job, parent = Job.load(job_file)
    die_with_parent(parent)
    return launch(job.config, job.run_dir.name, worker=MODULE, plan=job.plan)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
