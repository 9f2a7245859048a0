"""From a checked configuration to running processes. Level 7.

One process here, an agent with its own processes, or a place in a group that torchrun, srun or a
Kubernetes job has started. Nothing heavy is imported before it is known to be needed.
"""

from __future__ import annotations

import os
import traceback
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from lockstep.config.plan import Plan
from lockstep.config.refusals import check_new
from lockstep.config.schema import Config
from lockstep.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_STOPPED,
    EXIT_USER_ERROR,
    NotBegun,
    Stopped,
    UserError,
    unwritten,
)
from lockstep.launch import nccl
from lockstep.launch.env import Joined, join, say
from lockstep.launch.signals import StopFlag, refusing_to_start
from lockstep.parent import die_with_parent

WORKER = "lockstep.worker"


def launch(config: Config, name: str, *, worker: str = WORKER, plan: Plan | None = None) -> int:
    """Run to the end, tell the user how it ended, and return the exit code.

    Args:
        name: folder of the run below ``run.root``.
        worker: module whose ``run`` trains as one process.
        plan: made here when not given.
    """
    with refusing_to_start():
        try:
            return _launch(config, name, worker, plan)
        except UserError as exc:
            say(f"error: {exc}")
            return EXIT_USER_ERROR
        except (Stopped, NotBegun) as exc:
            from lockstep.launch.folder import again

            say(f"{exc}\n{again(Path(config.run.root) / name, config)}")
            return EXIT_STOPPED
        except Exception:  # noqa: BLE001 - the last to see it
            say(traceback.format_exc())
            return EXIT_FAILURE


def _launch(config: Config, name: str, worker: str, plan: Plan | None) -> int:
    joined = join(config)
    config = config.model_copy(update={"run": config.run.model_copy(update={"name": name})})
    run_dir = Path(config.run.root) / name
    if not config.plan and config.resume != "never" and _finished(config, run_dir):
        return EXIT_OK
    nccl.apply(config.nccl)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # what a hung rank waits for
    # Read when torch is imported; else a lost peer is told by stack traces of C++.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    given = config.resume
    if given not in ("auto", "never") and not (given.strip() and Path(given).is_dir()):
        raise UserError(
            f"resume = {given}: must be auto, never, or the folder of a run or checkpoint; there is no "
            "such folder"
        )
    if not (run_dir / "config.yaml").exists():
        check_new(config)
    plan = plan or _make_plan(config, joined)
    if config.plan:
        if joined is None or joined.rank == 0:
            try:
                print(plan.text(), flush=True)
            except OSError as exc:
                return unwritten(exc)
        return EXIT_OK

    from lockstep.launch.folder import claim
    from lockstep.launch.process import Job, join_group, leave, work

    check_images(config, run_dir)
    claims = joined is not None or plan.nodes > 1
    job = Job(config, plan, run_dir, worker, rank_zero_claims=claims)
    if joined is not None:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent(os.getppid())
        code = join_group(job)
        leave(code)
        return code
    with nullcontext() if claims else claim(run_dir, config, plan):
        if plan.world_size > 1 or config.launch.max_restarts:
            from lockstep.launch.agent import run_agent

            return run_agent(job)
        with StopFlag(last_chance=True) as stop:
            work(job, stop)
    return EXIT_OK


def _finished(config: Config, run_dir: Path) -> bool:
    """Tell of a run that is done already: it is never trained again by accident."""
    from lockstep.launch.folder import finished

    summary = finished(run_dir, config)
    if summary is None:
        return False
    check_images(config, run_dir)
    top1 = f"top-1 {summary['top1']:.2f} %" if "top1" in summary else "see DONE"
    say(f"already finished: {top1}, {run_dir}\nto train again: resume=never run.name=NEW_NAME")
    return True


def check_images(config: Config, run_dir: Path) -> None:
    """Other images are another run; those that moved are not."""
    from lockstep.data import open_split
    from lockstep.launch.folder import digests, trained_on

    root = trained_on(run_dir)
    if root in (None, config.data.root):
        return
    where = f"data.root = {config.data.root}: the images of {run_dir} were in {root}"
    known = digests(run_dir)
    if known != {split: open_split(config.data, split).digest for split in known}:
        raise UserError(f"{where}, and are others: give other images a run.name of their own")
    say(f"note: {where}; the same names and sizes are taken for the same images")


def _make_plan(config: Config, joined: Joined | None) -> Plan:
    from lockstep.launch.prepare import machine, prepare

    here = machine()
    if joined is None:
        return prepare(config, here)
    if joined.one_gpu_each:
        here = replace(here, num_gpus=joined.local_world_size)
    return prepare(joined.describe(config), here)
