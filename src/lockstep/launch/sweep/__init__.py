"""A sweep: many runs by one command, several at a time, each ``train.py`` in processes of its own.

What became of each is in the ledger, so the same command again does only what is left. Level 7.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from types import FrameType
from typing import IO, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf, read_write

from lockstep.config.bind import bind, fingerprint, run_name
from lockstep.config.cli import Command
from lockstep.config.schema import Config
from lockstep.errors import EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR, Stopped, UserError
from lockstep.launch.env import say
from lockstep.launch.folder import finished
from lockstep.launch.signals import STOP_SIGNALS, handling
from lockstep.launch.sweep.ledger import Entry, Ledger, State, claimed
from lockstep.launch.sweep.prune import is_poor, lower_is_better, result
from lockstep.launch.sweep.report import one_line, write_reports
from lockstep.machine import nvidia_smi
from lockstep.parent import die_with_parent

_TICK_SECONDS = 0.1
"""Between two looks at the running jobs."""

_LOOK_SECONDS = 1.0
"""Between two looks at their metric files."""

_TAIL_LINES = 15


@dataclass
class _Job:
    """One run of the sweep."""

    entry: Entry
    config: Config
    overrides: list[str]
    child: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    log_begins: int = 0
    """Bytes of earlier attempts."""
    slot: int = 0
    """Place among those that run at the same time."""
    began: float = 0.0
    pruned: bool = False
    waits: bool = False
    """Another sweep has it, and the user has been told."""
    held: ExitStack = field(default_factory=ExitStack)
    """What it owns while it runs: the claim on its run, GPUs, its log."""

    @property
    def run_dir(self) -> Path:
        return Path(self.entry.run_dir)


@dataclass
class Sweep:
    """Runs the jobs that Hydra composes, as many at a time as there is room for.

    A job that fails does not keep the others from running; a request to stop reaches all of them,
    and no other is started. Hydra's own launchers (joblib, submitit) copy this object to the
    processes that they start, one job each.
    """

    script: str
    command: Command
    began: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    folder: Path | None = None
    """Where ledger and reports are, once the configuration is known."""
    refused: list[Entry] = field(default_factory=list)
    """Jobs whose configuration is wrong: they have no run."""
    metric: str = "top1"
    _asked: list[int] = field(default_factory=list)
    """Signals to be passed on."""
    _told: int = 0
    """Jobs that the user has been told about."""
    _total: int = 0
    _runs: set[str] = field(default_factory=set)
    """Names of the jobs' runs."""
    _running: list[_Job] = field(default_factory=list)
    _stopped: bool = False
    _starts_jobs: bool = True
    """False: the processes of another launcher do."""

    def begin(self, raw: DictConfig) -> None:
        """Prepare for the jobs of a composed sweep.

        Raises:
            UserError: the sweep is itself one of several processes, cannot write its folder, or has
                a mistake that is the same in every job.
            Stopped: it was asked to stop meanwhile.
        """
        if "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS") or 1) > 1:
            raise UserError(
                "a sweep starts its own processes: run it without torchrun, and with one task "
                "(launch.processes=N are the processes of a job)"
            )
        self._refuse_what_all_share(raw)
        self.folder = Path(raw.run.root) / self.name
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise UserError(
                f"run.root = {raw.run.root}: cannot make {self.folder}: {exc.strerror}"
            ) from exc
        self.metric = raw.sweep.metric
        chosen_by_user = any("hydra.sweeper.direction=" in o for o in raw.hydra.overrides.hydra)
        if "direction" in raw.hydra.sweeper and not chosen_by_user:  # Optuna's
            way = "minimize" if lower_is_better(self.metric) else "maximize"
            with read_write(raw.hydra):
                OmegaConf.update(raw, "hydra.sweeper.direction", way)
        chosen = raw.hydra.launcher._target_
        self._starts_jobs = chosen.endswith(".BasicLauncher")
        # What submitit asks Slurm to send; to our agents its own choice, USR2, means another thing.
        os.environ.setdefault("SUBMITIT_PREEMPT_SIGNAL", "USR1")

        def launch(plugin: Any, jobs: Sequence[Sequence[str]], **_: Any) -> list[JobReturn]:
            return self._launch(plugin, jobs)

        if self._starts_jobs:
            # All are composed before one starts, so the sweeper need not try beforehand.
            Sweeper.validate_batch_is_legal = lambda *_: None  # type: ignore[method-assign]
            # Hydra's own would run one after another, in this process.
            Plugins.instance().class_name_to_class[chosen].launch = launch  # type: ignore[attr-defined]
        if self._asked:  # other launchers would not know
            raise Stopped("the sweep was asked to stop")

    def _refuse_what_all_share(self, raw: DictConfig) -> None:
        """Tell once of a wrong value that no job can change: a typed one, or one of the sweep's."""
        typed = {o.lstrip("+~").partition("=")[0] for o in self.command.overrides}
        fixed = typed - set(self.command.varied)
        try:
            _refuse_plan(bind(raw))
        except UserError as exc:
            lines = str(exc).splitlines()
            ours = [s for s in lines if s.startswith("sweep.") or re.split("[ :]", s)[0] in fixed]
            if ours:
                raise UserError("\n".join(ours)) from exc

    def run_here(
        self, raw: DictConfig, choices: Mapping[str, str], overrides: Sequence[str]
    ) -> float | None:
        """Run one job to its end, in a process of another launcher; returns its metric."""
        # A copy that submitit made of an object which was stopped starts anew, too.
        self._starts_jobs, self._stopped, self._asked = True, False, []
        with handling(self.on_signal) as before:
            job = self._job(raw, choices, overrides)
            if job is not None:
                self._run([job], 1)
        if self._asked and "SUBMITIT_EXECUTOR" in os.environ and callable(before[self._asked[0]]):
            # Everything is saved: submitit may now give the job back to the queue.
            before[self._asked[0]](self._asked[0], None)
        return job.entry.metrics.get(self.metric) if job is not None else None

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Have the running jobs save and stop, and start no other."""
        self._asked.append(signum)
        if self._starts_jobs:
            return
        self._stop_file.touch()
        if len(self._asked) > 1:  # its launcher is not waited for
            raise KeyboardInterrupt

    def report(self) -> None:
        """Write ``sweep.csv`` and the picture, and show the table."""
        if not (entries := self.entries()):
            return
        held = nullcontext() if self.folder is None else claimed(self.folder, "report", wait=True)
        with held or nullcontext():
            say("\n" + write_reports(self.folder, entries, self.metric))

    def entries(self) -> list[Entry]:
        """Every job of this sweep that is known by now."""
        if self.folder is None or not self.folder.exists():
            return self.refused
        entries = [e for e in self._ledger.entries() if e.run in self._runs or e.seen >= self.began]
        return [*entries, *self.refused]

    @property
    def is_empty(self) -> bool:
        """Whether it had nothing to do, and was not asked to stop before it knew."""
        return self._starts_jobs and not self._total and not self._asked

    @property
    def exit_code(self) -> int:
        """The first of a job that is not zero; 85 if some are left to be done."""
        entries = self.entries()
        codes = [e.exit_code for e in entries if e.state == "failed" and e.exit_code]
        left = self._asked or any(e.state in ("stopped", "waiting", "running") for e in entries)
        return codes[0] if codes else EXIT_STOPPED if left else EXIT_OK

    @cached_property
    def name(self) -> str:
        """Of the sweep, the same for the same command: what varies, and a digest of the rest."""
        where = ("sweep.", "hydra.", "hydra/", "run.root=")
        words = [w for w in self.command.overrides if not w.lstrip("+~").startswith(where)]
        digest = hashlib.sha256(shlex.join(sorted([*self.command.flags, *words])).encode())
        varied = re.sub(r"[^A-Za-z0-9._]+", "_", "-".join(self.command.varied))[:100]
        return "-".join(part for part in ("sweep", varied, digest.hexdigest()[:8]) if part)

    @cached_property
    def _ledger(self) -> Ledger:
        assert self.folder is not None, "the sweep has begun"
        return Ledger(self.folder)

    @property
    def _stop_file(self) -> Path:
        assert self.folder is not None
        return self.folder / "stop"

    def _launch(self, plugin: Any, batch: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Hydra's launcher, as the sweeper calls it: all jobs of a grid, or Optuna's next few."""
        setup_globals()
        self._total += len(batch)
        jobs: list[_Job | None] = []
        for overrides in batch:
            raw = plugin.hydra_context.config_loader.load_sweep_config(
                plugin.config, list(overrides)
            )
            jobs.append(self._job(raw, raw.hydra.runtime.choices, raw.hydra.overrides.task))
        here = [job for job in jobs if job is not None]
        self._run(here, self._at_once(here))
        if self._asked:
            raise Stopped("the sweep was asked to stop")
        return [self._returned(job) for job in jobs]

    def _returned(self, job: _Job | None) -> JobReturn:
        # No value is a failed trial to Optuna; an exception would end the sweep.
        value = job.entry.metrics.get(self.metric) if job is not None else None
        if job is not None and job.entry.state not in ("done", "pruned"):
            value = None
        ret = JobReturn(status=JobStatus.COMPLETED)
        ret.return_value = value
        return ret

    def _job(
        self, raw: DictConfig, choices: Mapping[str, str], overrides: Sequence[str]
    ) -> _Job | None:
        """A job as the ledger knows it; None, and the reason told, if it can never run."""
        swept = self.command.swept(overrides)
        varied = dict(o.lstrip("+~").partition("=")[::2] for o in swept)
        now = time.time()
        try:
            config = bind(raw)
            run_dir = Path(config.run.root) / run_name(config, choices, swept)
            _refuse_plan(config)
            if config.launch.scheduler != "local":
                raise UserError(
                    f"launch.scheduler = {config.launch.scheduler} in a sweep: leave it out, and "
                    "let hydra/launcher=submitit_slurm submit the jobs"
                )
        except UserError as exc:
            self._tell(" ".join(swept), f"failed\nerror: {exc}")
            label = " ".join(swept)
            self.refused.append(
                Entry(label, "", "", varied, "failed", EXIT_USER_ERROR, 0, 0.0, "", {}, now)
            )
            return None
        fresh = Entry(
            run_dir.name, str(run_dir), fingerprint(config), varied, "waiting", None, 0, 0.0, "",
            {}, now,
        )  # fmt: skip
        self._runs.add(run_dir.name)
        with claimed(run_dir.parent, run_dir.name) or nullcontext() as mine:
            entry = self._ledger.read(run_dir.name)
            if entry is None and mine is not None:
                self._ledger.write(fresh)
        return _Job(entry or fresh, config, list(overrides))

    def _at_once(self, jobs: Sequence[_Job]) -> int:
        """How many jobs run at the same time."""
        if not jobs:
            return 1
        sweep = jobs[0].config.sweep
        if sweep.jobs != "auto":
            return sweep.jobs
        if sweep.gpus_per_job is None or all(job.config.device == "cpu" for job in jobs):
            return 1
        return max(1, len(visible_gpus()) // sweep.gpus_per_job)

    def _run(self, jobs: Sequence[_Job], at_once: int) -> None:
        """Run jobs to their ends. Those that another sweep has come last: it may finish them."""
        waiting, next_look = list(jobs), 0.0
        passed_on = 0
        while waiting or self._running:
            if len(self._asked) > passed_on or self._stop_asked_elsewhere():
                for signum in self._asked[passed_on:] or [signal.SIGTERM]:
                    self._pass_on(signum)
                passed_on, self._stopped = len(self._asked), True
            if self._stopped:
                waiting.clear()
            for job in list(waiting):
                if len(self._running) >= at_once:
                    break
                if self._begin(job, at_once):
                    waiting.remove(job)
            for job in list(self._running):
                assert job.child is not None
                if job.child.poll() is not None:
                    self._running.remove(job)
                    self._end(job, job.child.returncode)
            if (now := time.monotonic()) >= next_look:
                next_look = now + _LOOK_SECONDS
                self._prune()
            time.sleep(_TICK_SECONDS)

    def _begin(self, job: _Job, at_once: int) -> bool:
        """Start a job, or see that it is done; False: not now."""
        root = job.run_dir.parent
        claim = claimed(root, job.entry.run)
        if claim is None:
            if not job.waits:
                say(f"{self._label(job)}: another sweep has it, and is waited for")
            job.waits = True
            return False
        job.held.enter_context(claim)
        # Another sweep may have done it meanwhile.
        job.entry = self._ledger.read(job.entry.run) or job.entry
        if self._settle(job):
            job.held.close()
            return True
        gpus = self._take_gpus(job, root)
        if gpus is None:
            job.held.close()
            return False
        used = {other.slot for other in self._running}
        job.slot = next(slot for slot in range(at_once) if slot not in used)
        env = dict(os.environ)
        # One group a sweep: what W&B itself reads.
        env.setdefault("WANDB_RUN_GROUP", self.name)
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        output: IO[bytes] | None = None
        if at_once > 1:
            assert self.folder is not None
            job.log = self.folder / "logs" / f"{job.entry.run}.log"
            job.log.parent.mkdir(exist_ok=True)
            output = job.held.enter_context(job.log.open("ab"))
            job.log_begins = output.tell()
        on = f" on GPU {', '.join(gpus)}" if gpus else ""
        self._tell(self._label(job), f"started{on}" + (f", output: {job.log}" if job.log else ""))
        job.began = time.time()
        self._note(job, "running", attempts=job.entry.attempts + 1, exit_code=None)
        job.child = subprocess.Popen(
            self._argv(job),
            env=env,
            stdout=output,
            stderr=output,
            # A session of its own: a terminal's Ctrl-C reaches it through us, and only once.
            start_new_session=True,
            preexec_fn=partial(_settle_in, os.getpid(), job.slot, at_once),  # noqa: PLW1509
        )
        self._running.append(job)
        return True

    def _settle(self, job: _Job) -> bool:
        """Whether there is nothing to do, because the run is finished or was pruned."""
        if job.entry.state == "pruned" and job.config.sweep.prune is not None:
            self._tell(self._label(job), "pruned before")
            self._note(job, "pruned")
            return True
        if job.config.resume == "never":
            return False
        try:
            summary = finished(job.run_dir, job.config)
        except UserError:
            return False  # the job itself tells
        if summary is None:
            return False
        self._note(job, "done", exit_code=EXIT_OK)
        self._tell(self._label(job), f"finished before, {one_line(job.entry, self.metric)}")
        return True

    def _take_gpus(self, job: _Job, root: Path) -> list[str] | None:
        """GPUs for the job alone, also beside other sweeps below ``run.root``; None: not now."""
        wanted = job.config.sweep.gpus_per_job
        if wanted is None or job.config.device == "cpu":
            return []
        gpus: list[str] = []
        for gpu in visible_gpus():
            if (held := claimed(root, f"{os.uname().nodename}-gpu-{gpu}")) is not None:
                job.held.enter_context(held)
                gpus.append(gpu)
            if len(gpus) == wanted:
                return gpus
        if len(visible_gpus()) < wanted:
            raise UserError(
                f"sweep.gpus_per_job = {wanted}, but {len(visible_gpus())} GPU(s) are visible: "
                "lower it, or leave it out with device=cpu"
            )
        return None

    def _argv(self, job: _Job) -> list[str]:
        words = [o for o in job.overrides if o.partition("=")[0] != "run.name"]
        return [
            sys.executable, self.script, *self.command.flags, *words,
            f"run.name='{job.entry.run}'", "hydra.mode=RUN",
        ]  # fmt: skip

    def _end(self, job: _Job, returncode: int) -> None:
        # As a shell would say it: a signal's number above 128.
        code = returncode if returncode >= 0 else 128 - returncode
        state: State = "done" if code == EXIT_OK else "failed"
        # Asked before it could listen, or once more while it saved.
        cut_off = self._stopped and -returncode in STOP_SIGNALS
        if code == EXIT_STOPPED or cut_off:
            state = "pruned" if job.pruned else "stopped"
        seconds = job.entry.seconds + time.time() - job.began
        self._note(job, state, exit_code=code, seconds=seconds)
        job.held.close()
        text = one_line(job.entry, self.metric)
        if state == "failed" and job.log is not None:
            told = job.log.read_bytes()[job.log_begins :].decode(errors="replace")
            tail = told.splitlines()[-_TAIL_LINES:]
            text += "".join(f"\n    {line}" for line in tail)
        say(f"{self._label(job)}: {text}")

    def _note(self, job: _Job, state: State, **changes: Any) -> None:
        metrics = result(job.run_dir) or job.entry.metrics
        job.entry = replace(
            job.entry, state=state, metrics=metrics, host=os.uname().nodename, seen=time.time(),
            **changes,
        )  # fmt: skip
        self._ledger.write(job.entry)

    def _prune(self) -> None:
        """Stop the jobs that do worse than the others did at the same step."""
        for job in self._running:
            rule = job.config.sweep
            if rule.prune is None or job.pruned or job.child is None:
                continue
            others = [Path(e.run_dir) for e in self.entries() if e.run_dir != job.entry.run_dir]
            if is_poor(job.run_dir, others, rule):
                job.pruned = True
                job.child.send_signal(signal.SIGTERM)

    def _pass_on(self, signum: int) -> None:
        for job in self._running:
            if job.child is not None and job.child.poll() is None:
                job.child.send_signal(signum)

    def _stop_asked_elsewhere(self) -> bool:
        """Whether the process that the user stopped is another one than this."""
        if self._stopped or self.folder is None or not self._stop_file.exists():
            return False
        return self._stop_file.stat().st_mtime >= self.began

    def _label(self, job: _Job) -> str:
        return " ".join(f"{k}={v}" for k, v in job.entry.varied.items()) or job.entry.run

    def _tell(self, label: str, what: str) -> None:
        self._told += 1
        say((f"[{self._told}/{self._total}] " if self._total > 1 else "") + f"{label}: {what}")


def _refuse_plan(config: Config) -> None:
    if config.plan:
        raise UserError(
            "plan = true: a sweep prints no plans: leave out -m, and give each key one value"
        )


def visible_gpus() -> list[str]:
    """Names by which ``CUDA_VISIBLE_DEVICES`` may choose from the GPUs that are visible here."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu.strip() for gpu in visible.split(",") if gpu.strip() not in ("", "-1")]
    return _all_gpus()


@cache
def _all_gpus() -> list[str]:
    return nvidia_smi("--query-gpu=index", "--format=csv,noheader") or []


def _settle_in(parent: int, slot: int, at_once: int) -> None:
    """In the new process: end with the sweep, and keep to one's share of the cores."""
    die_with_parent(parent)
    if at_once > 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // at_once)
        first = slot * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])
