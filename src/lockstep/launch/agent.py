"""Starts and watches the processes of a run on this node, on torch's elastic agent. Level 7."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.config.schema import Launch
from lockstep.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from lockstep.launch.env import say
from lockstep.launch.folder import DONE
from lockstep.launch.process import Job
from lockstep.launch.report import clear_reports, log_path, read_reports
from lockstep.launch.signals import STOP_SIGNALS, handling, install

_FAREWELL_SECONDS = 5.0
"""How long the peers of a failed process may take to say that they lost it."""

_TAIL_LINES = 20


class Agent(LocalElasticAgent):
    """Elastic's agent with our way of stopping.

    A request to stop goes to the workers, which save and end by themselves while the agent goes on
    watching; elastic's own way is to leave at once and to kill the workers after 30 s.
    """

    def __init__(self, spec: WorkerSpec, job: Job) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self.stop_signal: signal.Signals | None = None
        self.killed: set[int] = set()
        """Process ids of the workers that we ended ourselves."""
        self._job = job
        self._deadline = float("inf")

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Pass the request on; a second Ctrl-C ends the workers at once."""
        again, self.stop_signal = self.stop_signal is not None, signal.Signals(signum)
        if again and signum == signal.SIGINT:
            self._deadline = 0.0
            return
        running = self._running()
        for worker in running:
            # Not to its whole group, as elastic would: helpers of the worker outlive its last word.
            worker.send_signal(signum)
        if not running:
            raise SignalException("no worker to be waited for", signal.Signals(signum))
        if not again:
            grace = self._job.config.launch.grace_seconds
            self._deadline = min(self._deadline, time.monotonic() + grace)
            say(f"{self.stop_signal.name}: the run saves and stops, {grace:g} s at most")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._deadline = float("inf")
        workers: dict[int, Any] = super()._start_workers(worker_group)
        install(self.on_signal)  # again: elastic has just put its own handlers there
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        now = time.monotonic()
        if self._failed() and self._running():
            if self.stop_signal is None:
                self._deadline = min(self._deadline, now + _FAREWELL_SECONDS)
            if now < self._deadline:
                return RunResult(state=WorkerState.HEALTHY)
        if now >= self._deadline:
            self._kill()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            reports = read_reports(self._job.logs)
            if self.stop_signal or any(r.kind == "user" for r in reports):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                cause = f"rank {reports[0].rank}: {reports[0].message}" if reports else "a worker"
                say(f"{cause} failed; starting again, {self._remaining_restarts} time(s) left")
        return result

    def _processes(self) -> list[Any]:
        context: Any = self._pcontext  # of a command's workers: a SubprocessContext
        return [h.proc for h in context.subprocess_handlers.values()] if context else []

    def _running(self) -> list[Any]:
        return [p for p in self._processes() if p.poll() is None]

    def _failed(self) -> bool:
        return any(p.poll() not in (None, 0) for p in self._processes())

    def _kill(self) -> None:
        for worker in self._running():
            self.killed.add(worker.pid)
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def run_agent(job: Job) -> int:
    """Run the job's processes of this node to their end; returns the exit code.

    Raises:
        UserError: the other nodes are not to be met.
    """
    launch, plan = job.config.launch, job.plan
    _silence_elastic()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(s.name for s in STOP_SIGNALS)
    # torch's own default, all cores for each process, makes them fight.
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // plan.processes_per_node)))
    job.logs.mkdir(parents=True, exist_ok=True)
    clear_reports(job.logs)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        job_file = Path(folder) / "job.json"
        job.save(job_file)
        rendezvous = meet(launch, run_id=job.run_dir.name)
        agent = Agent(
            WorkerSpec(
                role="worker",
                local_world_size=plan.processes_per_node,
                entrypoint=sys.executable,
                args=("-m", "lockstep.launch.process", str(job_file)),
                rdzv_handler=rendezvous,
                max_restarts=launch.max_restarts,
                monitor_interval=0.1,
                local_addr=_local_address(launch),
            ),
            job,
        )
        result = None
        try:
            with handling(agent.on_signal):
                result = agent.run()
        except SignalException as exc:
            agent.stop_signal = agent.stop_signal or exc.sigval
        except RendezvousError as exc:
            raise _cannot_meet(launch, exc) from exc
        finally:
            rendezvous.shutdown()
    return verdict(job, agent, result)


def meet(launch: Launch, *, run_id: str) -> Any:
    """The rendezvous of the run's nodes; a single node takes any free port of its own.

    Raises:
        UserError: nobody answers at ``launch.rendezvous``.
    """
    wait = int(launch.timeout_seconds)
    try:
        return get_rendezvous_handler(
            RendezvousParameters(
                backend="c10d",
                endpoint=_endpoint(launch),
                run_id=run_id,
                min_nodes=launch.nodes,
                max_nodes=launch.nodes,
                local_addr=_local_address(launch),
                join_timeout=wait,
                read_timeout=wait,
            )
        )
    except RendezvousError as exc:
        raise _cannot_meet(launch, exc) from exc


def verdict(job: Job, agent: Agent, result: RunResult | None) -> int:
    """Tell the user once how the run ended; returns the exit code."""
    reports = read_reports(job.logs)
    stopped = next((r for r in reports if r.kind == "stopped"), None)
    failures = [r for r in reports if r.kind != "stopped"]
    if result is not None and not result.is_failed():
        if stopped is None:
            return EXIT_OK
        say(f"{stopped.message}\nthe same command goes on from {job.run_dir}")
        return EXIT_STOPPED
    if agent.stop_signal is not None and not failures:
        if agent.killed:
            say(
                f"stopped by {agent.stop_signal.name} without saving: the workers took longer than "
                f"launch.grace_seconds = {job.config.launch.grace_seconds:g}, or were killed by a "
                "second Ctrl-C. The same command goes on from the last checkpoint"
            )
            return EXIT_FAILURE
        if (job.run_dir / DONE).exists():
            return EXIT_OK
        say(f"stopped by {agent.stop_signal.name}; the same command goes on")
        return EXIT_STOPPED
    first = failures[0] if failures else None
    if first is not None and first.kind == "user":
        say(f"error: {first.message}")
        return EXIT_USER_ERROR
    reported = {r.rank for r in reports}
    silent = {
        rank: failure.exitcode
        for rank, failure in (result.failures if result is not None else {}).items()
        if rank not in reported and failure.pid not in agent.killed
    }
    if silent and (first is None or first.lost_peer):
        rank = min(silent)
        say(f"rank {rank} {_ending(silent[rank])}\n{_tail(log_path(job.logs, rank))}")
    elif first is not None:
        log = log_path(job.logs, first.rank)
        where = f"\nits output: {log}" if log.exists() else ""
        say(f"rank {first.rank} failed:\n{first.traceback}{where}")
    else:
        say("the workers ended without a word")
    return EXIT_FAILURE


def _ending(exitcode: int) -> str:
    if exitcode >= 0:
        return f"ended with exit code {exitcode} and without a report"
    name = signal.Signals(-exitcode).name
    hint = " (out of memory? see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def _tail(path: Path) -> str:
    if not path.exists():
        return "its output is above"
    lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"end of {path}:", *(f"  {line}" for line in lines)])


def _endpoint(launch: Launch) -> str:
    if launch.nodes == 1:
        return "localhost:0"
    assert launch.rendezvous is not None, "refused by the plan"
    return launch.rendezvous


def _local_address(launch: Launch) -> str | None:
    """What the other nodes call this one; by default elastic asks the resolver."""
    host = _endpoint(launch).rpartition(":")[0]
    # A machine alone need not be able to resolve its own name.
    return host if host in ("localhost", "127.0.0.1", "::1") else None


def _cannot_meet(launch: Launch, error: Exception) -> UserError:
    return UserError(
        f"launch.rendezvous = {_endpoint(launch)}: the {launch.nodes} node(s) did not meet within "
        f"launch.timeout_seconds = {launch.timeout_seconds:g} ({error}). Start the same command on "
        "every node, with an address of one of them and a free port"
    )


def _silence_elastic() -> None:
    """What elastic logs of a failure is our own report again, at length."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
