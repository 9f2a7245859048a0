"""Starts and watches the processes of a run on this node, on torch's elastic agent. Level 7."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
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

from lockstep.checkpoint.manifest import COMMITTED, step_folders
from lockstep.config.schema import Launch
from lockstep.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED, EXIT_USER_ERROR, UserError
from lockstep.launch.env import say
from lockstep.launch.folder import DONE, again, writing
from lockstep.launch.hang import find_hang
from lockstep.launch.process import Job
from lockstep.launch.report import Report, log_path, read_reports
from lockstep.launch.signals import REGROUP_SIGNAL, STOP_SIGNALS, handling, install
from lockstep.machine import cores
from lockstep.telemetry.phases import Phase, read_phases, stack_path

_FAREWELL_SECONDS = 5.0
"""How long the peers of a failed process may take to say that they lost it."""

_GOODBYE_SECONDS = 0.1

_TAIL_LINES = 20

_CRASH_LOOP = 3
"""Failures without a new checkpoint between them after which another start is no use."""

_ANY_NUMBER = 1_000_000
"""Of restarts, for elastic: whether there is another one is our decision."""

_WATCH_SECONDS = 1.0
"""Between two looks at where the workers are."""


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
        self.hang: str | None = None
        """Who kept the others waiting in the last attempt."""
        self.gave_up: str | None = None
        """Why there is no further attempt, if one would have been allowed."""
        self.started = 0.0
        """When the workers of this attempt were started, seconds since the epoch."""
        self._job = job
        self._deadline = float("inf")
        self._next_look = 0.0
        self._asked_to_regroup = False
        self._restarts = 0
        self._failures = 0
        """Since the last new checkpoint."""
        self._newest_step = self._newest_checkpoint()

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

    def _invoke_run(self, role: str = "worker") -> RunResult:
        """Elastic's loop with our rules for starting again."""
        group = self._worker_group
        self._initialize_workers(group)
        while True:
            time.sleep(group.spec.monitor_interval)
            result = self._monitor_workers(group)
            group.state = result.state
            if result.state is WorkerState.SUCCEEDED:
                if self.stop_signal or not any(r.kind == "regroup" for r in self._reports()):
                    self._exit_barrier()  # type: ignore[no-untyped-call]
                    return result
                self._form_anew(group)
            elif result.is_failed():
                self._kill()
                if not self._may_start_again(result):
                    group.state = WorkerState.FAILED
                    self._say_goodbye()
                    return result
                self._form_anew(group)
            elif not self.stop_signal and group.spec.rdzv_handler.num_nodes_waiting() > 0:
                self._make_room(group)

    def _say_goodbye(self) -> None:
        """Have the agents that are done already not wait for this one, for five minutes."""
        self._exit_barrier_timeout = _GOODBYE_SECONDS
        self._exit_barrier()  # type: ignore[no-untyped-call]

    def _form_anew(self, group: WorkerGroup) -> None:
        # What workers see as their restart count.
        self._remaining_restarts -= 1
        self._restart_workers(group)

    def _make_room(self, group: WorkerGroup) -> None:
        """Let the workers save and end, so that a group with the waiting node can form."""
        if not self._asked_to_regroup:
            began = [phase for phase in self._phases() if phase.steps_here > 0]
            # A group shall have done a step before it makes room, or two nodes could forever.
            if len(began) == len(group.workers):
                say("a node wants to join: the run saves, and goes on with it")
                self._asked_to_regroup = True
                # They may be in a long evaluation; but if they wait for a peer that was lost, and
                # waits here to come back, they will not end.
                self._deadline = time.monotonic() + self._job.config.launch.timeout_seconds
                for worker in self._running():
                    worker.send_signal(REGROUP_SIGNAL)
        elif time.monotonic() >= self._deadline:
            self._kill()
            self._form_anew(group)

    def _may_start_again(self, result: RunResult) -> bool:
        """Whether the failed workers are started again; tells the user so."""
        launch, reports = self._job.config.launch, self._reports()
        if self.stop_signal or any(r.kind == "user" for r in reports):
            return False
        newest = self._newest_checkpoint()
        if newest > self._newest_step:
            self._newest_step, self._failures = newest, 0
        self._failures += 1
        cause = self.hang or cause_of(reports, result, self.killed)
        lost_others = (
            launch.elastic
            and bool(reports)
            and all(r.lost_peer for r in reports)
            and not silent_ranks(reports, result, self.killed)
        )
        self._restarts += not lost_others
        allowed = launch.max_restarts
        if allowed is None:
            allowed = self._restarts if launch.elastic else 0
        if self._restarts > allowed:
            return False
        since = f"step {newest}" if newest >= 0 else "the beginning"
        if self._failures >= _CRASH_LOOP:
            self.gave_up = (
                f"the run failed {_CRASH_LOOP} times without a new checkpoint since {since}: "
                "starting again is no use"
            )
            return False
        left = "" if launch.elastic else f", {allowed - self._restarts} time(s) left"
        say(f"{cause}; starting again from {since}{left}")
        return True

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._deadline = float("inf")
        self._asked_to_regroup = False
        self.hang = None
        self.started = time.time()
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
        if now >= self._next_look:
            self._next_look = now + _WATCH_SECONDS
            self._look_for_hang(worker_group)
        if now >= self._deadline and (self.stop_signal or not self._asked_to_regroup):
            self._kill()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _look_for_hang(self, group: WorkerGroup) -> None:
        ranks = [worker.global_rank for worker in group.workers]
        if len(self._phases()) < len(ranks):
            return
        timeout = self._job.config.launch.timeout_seconds
        world_size = (group.group_world_size or 1) * len(ranks)
        self.hang = find_hang(self._job.logs, ranks, world_size, timeout)
        if self.hang is not None:
            self._kill()

    def _reports(self) -> list[Report]:
        return read_reports(self._job.logs, self.started)

    def _phases(self) -> list[Phase]:
        """Where the running workers of this node are, those that have said so."""
        pids = {worker.pid for worker in self._running()}
        return [phase for phase in read_phases(self._job.logs) if phase.pid in pids]

    def _newest_checkpoint(self) -> int:
        folders = step_folders(self._job.run_dir / "checkpoints")
        return next((step for step, path in folders if (path / COMMITTED).exists()), -1)

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
    # Else a group that forms anew meets what the former one has left in the store.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(s.name for s in STOP_SIGNALS)
    # torch's own default, all cores for each process, makes them fight.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // plan.processes_per_node)))
    with writing(job.logs, Path(job.config.run.root)):
        job.logs.mkdir(parents=True, exist_ok=True)
    # In the run's folder: an agent that is killed leaves nothing elsewhere.
    job_file = job.logs / f"job-{socket.gethostname()}-{os.getpid()}.json"
    with _written(job, job_file):
        rendezvous = meet(launch, run_id=job.run_dir.name)
        agent = Agent(
            WorkerSpec(
                role="worker",
                local_world_size=plan.processes_per_node,
                entrypoint=sys.executable,
                args=("-m", "lockstep.launch.process", str(job_file)),
                rdzv_handler=rendezvous,
                max_restarts=_ANY_NUMBER,
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
            if (job.run_dir / DONE).exists():
                say(f"the run is finished: {job.run_dir}")
                return EXIT_OK
            if agent.started:
                say(f"error: {_lost_rendezvous(launch, job.run_dir)}")
                return EXIT_FAILURE
            raise _cannot_meet(launch, exc) from exc
        finally:
            if not launch.elastic or (result is not None and not result.is_failed()):
                rendezvous.shutdown()  # for all nodes; those of an elastic group may go on
    return verdict(job, agent, result)


@contextmanager
def _written(job: Job, path: Path) -> Iterator[None]:
    job.save(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


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
                min_nodes=launch.min_nodes,
                max_nodes=launch.max_nodes,
                local_addr=_local_address(launch),
                join_timeout=wait + math.ceil(launch.gather_seconds),
                read_timeout=wait,
                last_call_timeout=math.ceil(launch.gather_seconds),
            )
        )
    except RendezvousError as exc:
        raise _cannot_meet(launch, exc) from exc


def verdict(job: Job, agent: Agent, result: RunResult | None) -> int:
    """Tell the user once how the run ended; returns the exit code."""
    reports = read_reports(job.logs, agent.started)
    then = partial(again, job.run_dir, job.config)
    stopped = next((r for r in reports if r.kind in ("stopped", "regroup")), None)
    failures = [r for r in reports if r.kind in ("user", "crash")]
    if result is not None and not result.is_failed():
        if stopped is None and (job.run_dir / DONE).exists():
            return EXIT_OK
        if stopped is None:
            say("the workers ended without a word and without finishing; is the disk full?")
            return EXIT_FAILURE
        say(f"{stopped.message}\n{then()}")
        return EXIT_STOPPED
    if agent.stop_signal is not None and not failures:
        if agent.killed:
            say(
                f"stopped by {agent.stop_signal.name} without saving: the workers took longer than "
                f"launch.grace_seconds = {job.config.launch.grace_seconds:g}, or were killed by a "
                f"second Ctrl-C; {then()}"
            )
            return EXIT_FAILURE
        if (job.run_dir / DONE).exists():
            return EXIT_OK
        say(f"stopped by {agent.stop_signal.name}; {then()}")
        return EXIT_STOPPED
    first = failures[0] if failures else None
    if first is not None and first.kind == "user":
        say(f"error: {first.message}")
        return EXIT_USER_ERROR
    if agent.gave_up is not None:
        say(agent.gave_up)
    if agent.hang is not None:
        say(f"{agent.hang}\nwhere its threads were: {stack_path(job.logs, 0).with_name('stack-*')}")
        say(then())
        return EXIT_FAILURE
    silent = silent_ranks(reports, result, agent.killed)
    if silent and (first is None or first.lost_peer):
        rank = min(silent)
        say(f"rank {rank} {_ending(silent[rank])}\n{_tail(log_path(job.logs, rank))}")
    elif first is not None:
        log = log_path(job.logs, first.rank)
        where = f"\nits output: {log}" if log.exists() else ""
        say(f"rank {first.rank} failed:\n{first.traceback}{where}")
    else:
        say("the workers ended without a word")
    say(then())
    return EXIT_FAILURE


def silent_ranks(
    reports: list[Report], result: RunResult | None, killed: Collection[int]
) -> dict[int, int]:
    """Exit codes of the workers that ended without a report and not by our hand, by rank."""
    reported = {r.rank for r in reports}
    return {
        rank: failure.exitcode
        for rank, failure in (result.failures if result is not None else {}).items()
        if rank not in reported and failure.pid not in killed
    }


def cause_of(reports: list[Report], result: RunResult, killed: Collection[int]) -> str:
    """Why the workers failed, in one line."""
    silent = silent_ranks(reports, result, killed)
    if silent and (not reports or reports[0].lost_peer):
        return f"rank {min(silent)} {_ending(silent[min(silent)])}"
    if not reports:
        return "the workers ended without a word"
    if reports[0].lost_peer:
        return "a process of another node is lost"
    return f"rank {reports[0].rank} failed: {reports[0].message.splitlines()[0]}"


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
    if not lines:
        return "it has printed nothing"
    return "\n".join([f"end of {path}:", *(f"  {line}" for line in lines)])


def _endpoint(launch: Launch) -> str:
    if launch.max_nodes == 1:
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
        f"launch.rendezvous = {_endpoint(launch)}: the nodes ({launch.nodes}) did not meet within "
        f"launch.timeout_seconds = {launch.timeout_seconds:g} ({error}). Start the same command on "
        "every node, with an address of one of them and a free port"
    )


def _lost_rendezvous(launch: Launch, run_dir: Path) -> str:
    return (
        f"launch.rendezvous = {_endpoint(launch)}: the node there is lost, and without it the "
        "others cannot meet again. Nothing is lost: start the same command on the nodes that "
        f"remain, with an address of one of them; it goes on with {run_dir}"
    )


def _silence_elastic() -> None:
    """What elastic logs of a failure is our own report again, at length."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.propagate = False
    logger.addHandler(logging.NullHandler())
