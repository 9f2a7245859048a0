"""Who decodes: threads of this process, or processes beside it. Level 2.

Where a GPU trains, threads would not do: they and the loop that launches its kernels share Python's
lock, and every image takes it a dozen times. Sixteen of them leave the loop a hundredth of its pace.
The processes are forked before training starts, write into memory that the GPU copies from, and
hear only which samples to put where.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Protocol

import numpy as np
import torch

from lockstep.errors import UserError
from lockstep.memory import SharedMemory, attach
from lockstep.parent import UNWANTED_SIGNALS, die_with_parent

_DEPTH = 2
"""Tasks that a process has at once: the next is there when one is done."""
_NICENESS = 15
"""Launching kernels comes first: a GPU without work costs more than a core."""


@dataclass(frozen=True, slots=True)
class Filled:
    """What became of some rows."""

    erase: np.ndarray
    """[rows, 4] int64: box to be erased, in pixels of the square."""
    reasons: dict[int, str]
    """Row, counted from the task's first, and why it could not be read."""


Work = Callable[[np.ndarray, np.ndarray, np.ndarray], Filled]
"""Fills rows: indices and seeds, [rows] int64 each, and the pixels to be, [rows, S, S, 3] uint8."""


@dataclass(slots=True)
class Buffer:
    """Where the pixels of a batch come together."""

    pixels: torch.Tensor
    """[m, S, S, 3] uint8; pinned for CUDA."""
    shared: SharedMemory | None = None
    copied: torch.cuda.Event | None = None
    """When the device has taken them, and they may be written over."""


class Workers(Protocol):
    """Fill rows of buffers, many at a time."""

    def buffer(self, shape: tuple[int, int, int, int]) -> Buffer:
        """One that nobody uses; its content is any."""

    def give_back(self, buffer: Buffer) -> None:
        """Of which no task is open, and which is copied when its event says so."""

    def fill(
        self, buffer: Buffer, rows: range, indices: np.ndarray, seeds: np.ndarray
    ) -> Future[Filled]:
        """Have some rows filled; the future may raise what ``Work`` raises."""

    def drain(self) -> None:
        """Leave out what has not begun, and wait for the rest."""

    def close(self) -> None:
        """End them."""


class Threads:
    """Of this process; they end whenever they are drained."""

    def __init__(self, work: Work, count: int, *, pinned: bool) -> None:
        self._work = work
        self._count = count
        self._pinned = pinned
        self._pool: ThreadPoolExecutor | None = None

    def buffer(self, shape: tuple[int, int, int, int]) -> Buffer:
        return Buffer(torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned))

    def give_back(self, buffer: Buffer) -> None:
        """Torch's own allocator knows when it may be used again."""

    def fill(
        self, buffer: Buffer, rows: range, indices: np.ndarray, seeds: np.ndarray
    ) -> Future[Filled]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="decode")
        into = buffer.pixels[rows.start : rows.stop].numpy()
        return self._pool.submit(self._work, indices, seeds, into)

    def drain(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def close(self) -> None:
        self.drain()


@dataclass(frozen=True, slots=True)
class _Task:
    """What a process hears."""

    memory: str
    shape: tuple[int, int, int, int]
    start: int
    stop: int
    indices: np.ndarray
    seeds: np.ndarray


@dataclass(slots=True)
class _Worker:
    """A process, seen from here."""

    pid: int
    pipe: Connection
    open: deque[Future[Filled]] = field(default_factory=deque)
    """Its tasks, in the order in which it answers them."""


class Processes:
    """Forked from this one; they see what it had in memory then, and end with it at the latest."""

    def __init__(self, work: Work, count: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._owner = os.getpid()
        self._free: deque[Buffer] = deque()
        self._all: list[Buffer] = []
        self._crew = _Crew(work, count)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [worker.pid for worker in self._crew.workers]

    def buffer(self, shape: tuple[int, int, int, int]) -> Buffer:
        size = int(np.prod(shape))
        for _ in range(len(self._free)):
            buffer = self._free.popleft()
            assert buffer.shared is not None
            free = buffer.copied is None or buffer.copied.query()
            if free and len(buffer.shared) >= size:
                buffer.copied = None
                buffer.pixels = buffer.shared.tensor()[:size].view(shape)
                return buffer
            self._free.append(buffer)
        shared = SharedMemory(max(size, mmap.PAGESIZE), pinned=self._pinned)
        buffer = Buffer(shared.tensor()[:size].view(shape), shared)
        self._all.append(buffer)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)

    def fill(
        self, buffer: Buffer, rows: range, indices: np.ndarray, seeds: np.ndarray
    ) -> Future[Filled]:
        assert buffer.shared is not None
        n, height, width, channels = buffer.pixels.shape
        shape = (n, height, width, channels)
        return self._crew.submit(
            _Task(buffer.shared.path, shape, rows.start, rows.stop, indices, seeds)
        )

    def drain(self) -> None:
        self._crew.drain()

    def close(self) -> None:
        if os.getpid() != self._owner:  # a child that throws away its copy
            return
        self._crew.dismiss("is closed")
        for buffer in self._all:
            if buffer.copied is not None:
                buffer.copied.synchronize()
            assert buffer.shared is not None
            buffer.shared.close()
        self._all, self._free = [], deque()

    def __del__(self) -> None:
        if hasattr(self, "_crew"):
            self.close()


class WorkerLostError(RuntimeError):
    """A process that decodes is gone; like the loss of a rank, this may not happen again."""


class _Crew:
    """The processes and their tasks; all that the listening thread holds on to."""

    def __init__(self, work: Work, count: int) -> None:
        self.workers: list[_Worker] = []
        self._waiting: deque[tuple[_Task, Future[Filled]]] = deque()
        self._lock = threading.Lock()
        self._end: WorkerLostError | None = None
        # A collection in a child would copy all that the parent has.
        gc.collect()
        gc.freeze()
        try:
            for _ in range(count):
                self.workers.append(_fork(work, self.workers))
        except OSError as error:
            self.dismiss("could not be started")
            raise UserError(
                f"data.workers = {count}: no more processes can be started ({error.strerror}): "
                "use fewer"
            ) from error
        finally:
            gc.unfreeze()
        threading.Thread(target=self._listen, name="decode-answers", daemon=True).start()

    def submit(self, task: _Task) -> Future[Filled]:
        future: Future[Filled] = Future()
        with self._lock:
            if self._end is None:
                self._waiting.append((task, future))
                self._hand_out()
            else:
                future.set_exception(self._end)
        return future

    def drain(self) -> None:
        with self._lock:
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()
            begun = [future for worker in self.workers for future in worker.open]
        for future in begun:
            future.exception()

    def dismiss(self, why: str) -> None:
        """End the processes; what they had to do fails."""
        with self._lock:
            if self._end is not None:
                return
            self._end = WorkerLostError(f"a process that decodes images {why}")
            for worker in self.workers:
                os.kill(worker.pid, signal.SIGKILL)  # nothing of theirs is worth a farewell
                with suppress(ChildProcessError):
                    os.waitpid(worker.pid, 0)
            lost = [future for worker in self.workers for future in worker.open]
            lost += [future for _, future in self._waiting]
            self._waiting.clear()
            for worker in self.workers:
                worker.open.clear()
        for future in lost:
            if not future.done():
                future.set_exception(self._end)

    def _hand_out(self) -> None:
        """Give waiting tasks to whoever has least; with the lock held."""
        while self._waiting:
            worker = min(self.workers, key=lambda w: len(w.open))
            if len(worker.open) >= _DEPTH:
                return
            task, future = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            worker.open.append(future)
            with suppress(OSError):  # it has died: the listener tells
                worker.pipe.send(task)

    def _listen(self) -> None:
        pipes = {worker.pipe: worker for worker in self.workers}
        how = None
        while how is None:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                worker = pipes[pipe]
                try:
                    answer = pipe.recv()
                except (EOFError, OSError):
                    how = _death(worker)
                    break
                except Exception:  # noqa: BLE001 - whoever waits must be told, whatever it is
                    how = f"answers nonsense: {traceback.format_exc()}"
                    break
                self._take(worker, answer)
        self.dismiss(how)
        for pipe in pipes:
            pipe.close()

    def _take(self, worker: _Worker, answer: Filled | Exception) -> None:
        with self._lock:
            if self._end is not None:
                return
            future = worker.open.popleft()
            self._hand_out()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _death(worker: _Worker) -> str:
    try:
        # Looked at alone: its number must stay its own until it is dismissed.
        found = os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # dismissed
        found = None
    if found is None:
        return "has ended"
    if found.si_code in (os.CLD_KILLED, os.CLD_DUMPED):
        name = signal.Signals(found.si_status).name
        return f"was killed by {name} (out of memory? see dmesg; fewer data.workers need less)"
    return f"ended with code {found.si_status}"


def make_workers(kind: str, work: Work, count: int, device: torch.device) -> Workers:
    """``data.worker_kind``: ``thread``, ``process``, or ``auto``: processes where a GPU trains."""
    pinned = device.type == "cuda"
    if kind == "process" or (kind == "auto" and pinned and sys.platform == "linux"):
        return Processes(work, count, pinned=pinned)
    return Threads(work, count, pinned=pinned)


def _fork(work: Work, others: list[_Worker]) -> _Worker:
    ours, theirs = Pipe()
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # Nothing may interrupt the child before it is one: it would go on as a second parent.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UNWANTED_SIGNALS)
    try:
        pid = os.fork()
        if pid:
            theirs.close()
            return _Worker(pid, ours)
        _be_a_worker(parent, theirs, [ours, *(other.pipe for other in others)], work)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    raise AssertionError("a worker does not come back")


def _be_a_worker(parent: int, pipe: Connection, foreign: list[Connection], work: Work) -> None:
    code = 1
    try:
        die_with_parent(parent)
        os.nice(_NICENESS)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what they load later must not look for a GPU
        for number in UNWANTED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for other in foreign:
            other.close()
        torch.set_num_threads(1)  # the pool of OpenMP's threads did not survive the fork
        _serve(pipe, work)
        code = 0
    except BaseException:  # noqa: BLE001 - the parent's handlers are not for this process
        traceback.print_exc()
    finally:
        os._exit(code)


def _serve(pipe: Connection, work: Work) -> None:
    mapped: dict[str, mmap.mmap] = {}
    """By path: a buffer is closed after the workers are."""
    while True:
        try:
            task: _Task = pipe.recv()
        except EOFError:
            return
        try:
            if task.memory not in mapped:
                mapped[task.memory] = attach(task.memory)
            count = int(np.prod(task.shape))
            pixels = np.frombuffer(mapped[task.memory], np.uint8, count).reshape(task.shape)
            answer: Filled | Exception = work(
                task.indices, task.seeds, pixels[task.start : task.stop]
            )
        except UserError as error:
            answer = error
        except Exception:  # noqa: BLE001 - whoever waits for these rows raises it
            answer = RuntimeError(traceback.format_exc())
        pipe.send(answer)
