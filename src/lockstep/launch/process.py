"""One process of a run: its output, its end, its report. Level 7.

``python -m lockstep.launch.process JOB.json`` is what the agent starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from lockstep.config.bind import bind
from lockstep.config.plan import Plan, replan
from lockstep.config.schema import Config
from lockstep.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR, tell
from lockstep.launch.folder import LOGS, again, claim
from lockstep.launch.hang import find_hang
from lockstep.launch.report import Report, clear_report, log_path, read_reports
from lockstep.launch.signals import StopFlag
from lockstep.parent import die_with_parent


@dataclass(frozen=True)
class Job:
    """What a process of a run needs to know."""

    config: Config
    plan: Plan
    run_dir: Path
    worker: str
    """Module whose ``run(config, plan, run_dir, stop)`` trains as one rank."""
    rank_zero_claims: bool
    """Rank 0 claims the run folder; otherwise the launcher has done it."""

    @property
    def logs(self) -> Path:
        return self.run_dir / LOGS

    def save(self, path: Path) -> None:
        """Write the job for :meth:`load` in another process of this machine."""
        values = {
            "config": self.config.model_dump(mode="json", by_alias=True),
            "plan": self.plan.to_json(),
            "run_dir": str(self.run_dir),
            "worker": self.worker,
            "rank_zero_claims": self.rank_zero_claims,
            "agent": os.getpid(),
        }
        path.write_text(json.dumps(values))

    @classmethod
    def load(cls, path: Path) -> tuple[Job, int]:
        """A saved job, and the process that saved it."""
        raw = json.loads(path.read_text())
        job = cls(
            config=bind(raw["config"]),
            plan=Plan.from_json(raw["plan"]),
            run_dir=Path(raw["run_dir"]),
            worker=raw["worker"],
            rank_zero_claims=raw["rank_zero_claims"],
        )
        return job, raw["agent"]


def work(job: Job, stop: StopFlag) -> None:
    """Train as the rank that the environment describes.

    Raises:
        UserError, Stopped: as the worker.
    """
    plan = job.plan
    if job.config.launch.elastic:
        nodes = int(os.environ["WORLD_SIZE"]) // plan.processes_per_node
        plan = replan(job.config, plan, nodes)
    claims = job.rank_zero_claims and _rank() == 0
    with claim(job.run_dir, job.config, plan) if claims else nullcontext():
        import_module(job.worker).run(job.config, plan, job.run_dir, stop)


def work_and_report(job: Job) -> int:
    """Train as one of several processes; returns the exit code, the reason is in the report."""
    rank = _rank()
    job.logs.mkdir(parents=True, exist_ok=True)
    if rank != 0:
        _redirect_output(log_path(job.logs, rank))
    clear_report(job.logs, rank)
    try:
        with StopFlag(last_chance=False) as stop:
            work(job, stop)
    except BaseException as exc:  # noqa: BLE001 - the last to see it
        report = Report.of(exc, rank)
        report.write(job.logs)
        if report.kind == "crash" and rank != 0:
            tell(report.traceback, sys.stderr)
        codes = {
            "user": EXIT_USER_ERROR,
            "stopped": EXIT_STOPPED,
            "regroup": EXIT_STOPPED,
            "crash": EXIT_FAILURE,
        }
        return codes[report.kind]
    return EXIT_OK


def join_group(job: Job) -> int:
    """Train as a process that torchrun or srun has started; returns the exit code.

    There is no parent of ours, so the process tells its end itself: rank 0 what all ranks share,
    and of several that crash the one that is most likely the cause.
    """
    rank, terminal = _rank(), os.dup(2)
    code = work_and_report(job)
    reports = read_reports(job.logs) if code != EXIT_OK else []
    mine = next((r for r in reports if r.rank == rank), None)
    text = ""
    if mine is None or (mine.kind != "crash" and rank != 0):
        return code
    if mine.kind == "user":
        text = f"error: {mine.message}\n"
    elif mine.kind == "stopped":
        text = f"{mine.message}\n{again(job.run_dir, job.config)}\n"
    elif reports[0].rank == rank:
        hang = find_hang(job.logs, [rank], job.plan.world_size, job.config.launch.timeout_seconds)
        text = f"rank {rank} failed:\n{mine.traceback}" + (f"{hang}\n" if hang else "")
    os.write(terminal, text.encode())
    return code


def main(job_file: Path) -> int:
    """Entry point of a worker of our own agent."""
    job, agent = Job.load(job_file)
    die_with_parent(agent)
    # Until training listens, a signal just ends the process: nothing is there to be saved.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    code = work_and_report(job)
    # To the agent a nonzero code is a failure that ends the peers or restarts the group.
    return EXIT_OK if code == EXIT_STOPPED else code


def leave(code: int) -> None:
    """End now. Everything is written: neither threads nor destructors may wait for a lost peer, or
    abort a process that has done its work, as C++ threads do now and then."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _redirect_output(path: Path) -> None:
    """Send stdout and stderr to a file, native code's included."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
