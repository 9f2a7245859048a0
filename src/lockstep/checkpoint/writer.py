"""A process beside each rank that saves copies of its state while training goes on. Level 4.

A thread would not do: planning and writing a thousand tensors is half a second of Python, and while
a thread holds Python's lock the training cannot keep the GPU busy. The copies lie in memory that
both processes see. The processes of all ranks have a process group of their own.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from lockstep import dist
from lockstep.checkpoint import shards
from lockstep.checkpoint.saver import Saver
from lockstep.checkpoint.shards import Tensors
from lockstep.errors import UserError
from lockstep.parent import die_with_parent

_ALIGN_BYTES = 4096
_UNWANTED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What is meant for the rank reaches its whole group or job; the writer ends with its rank."""
_FAREWELL_SECONDS = 10.0
_PATIENCE = timedelta(days=7)
"""How long a disk takes is nobody's mistake, and a peer that dies closes the connection."""


@dataclass(frozen=True)
class _Slot:
    """Where one tensor lies in the common memory."""

    group: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Setup:
    """What the process needs to know, plain values."""

    parent: int
    memory: str
    num_bytes: int
    slots: list[_Slot]
    plan: SavePlan
    saver: Saver
    place: tuple[str, int, int, int] | None
    """Address and port of the store, rank and number of ranks; None: alone."""


class Writer:
    """This rank's process. All ranks make one, and call it alike."""

    def __init__(self, saver: Saver, tensors: Tensors) -> None:
        """Start it; it becomes ready behind the training.

        Args:
            tensors: what will be saved; each save has the same names, shapes and dtypes.
        """
        self._share = _share(tensors)
        tensors = _only(tensors, self._share)
        slots, num_bytes = _layout(tensors)
        self._descriptor = os.memfd_create("lockstep-checkpoint")
        os.ftruncate(self._descriptor, num_bytes)
        self._memory = mmap.mmap(self._descriptor, num_bytes)
        self._on_gpu = any(t.is_cuda for group in tensors.values() for t in group.values())
        if self._on_gpu:
            _pin(self._memory)
        self._buffers = _tensors_in(self._memory, slots)
        self._stream = torch.cuda.Stream() if self._on_gpu else None
        self._arrived: torch.cuda.Event | None = None
        self._sources: list[torch.Tensor] = []
        self._answer: _Answer | None = None
        self._busy = False
        self._store, place = _meeting_point()
        setup = _Setup(
            os.getpid(),
            f"/proc/{os.getpid()}/fd/{self._descriptor}",
            num_bytes,
            slots,
            shards.plan_of(tensors),
            saver,
            place,
        )
        self._pipe, theirs = Pipe()
        self._process = _start(theirs)
        # In a thread: the other side reads when it has imported torch, seconds later.
        self._setting_up = threading.Thread(target=self._set_up, args=(setup,), daemon=True)
        self._setting_up.start()

    def _set_up(self, setup: _Setup) -> None:
        with suppress(OSError):  # a process that has died is told by the first save
            self._pipe.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def copy(self, tensors: Tensors, changing: Collection[torch.Tensor]) -> None:
        """Begin to copy the state; from a GPU on a stream of its own, beside the next kernels.

        Args:
            changing: tensors that the next forward pass may write to, not only the next update.
        """
        early = {tensor.data_ptr() for tensor in changing if tensor.is_cuda}
        self._sources = []
        pairs = []
        for group, items in _only(tensors, self._share).items():
            for name, tensor in items.items():
                local = shards.local(tensor)
                if local.data_ptr() in early:
                    local = local.clone()
                if local.is_cuda:
                    self._sources.append(local)
                pairs.append((self._buffers[group][name], local))
        if self._stream is None:
            for host, local in pairs:
                host.copy_(local)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for host, local in pairs:
                host.copy_(local, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def fence(self) -> None:
        """Let the device finish the copies before it runs what is queued next; the host goes on."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)

    def begin(self, step: int, meta: dict[str, Any], metric: float | None) -> None:
        """Write the copies."""
        assert not self._busy
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
            self._sources = []
        self._setting_up.join()
        self._busy = True
        self._answer = None
        try:
            self._pipe.send((step, meta, metric))
        except OSError:
            self._answer = _Answer(False, self._death())

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        if self._busy and self._answer is None and self._pipe.poll():
            self._answer = self._receive()
        return not self._busy or self._answer is not None

    @property
    def failed(self) -> bool:
        """Whether the save is known to have failed."""
        return self.done() and self._answer is not None and self._answer.error is not None

    def wait(self) -> None:
        """Wait for the save that was begun.

        Raises:
            UserError: it failed, on all ranks alike.
        """
        if not self._busy:
            return
        answer = self._answer or self._receive()
        self._busy, self._answer = False, None
        if answer.error is not None:
            raise (UserError if answer.is_users else RuntimeError)(answer.error)

    def close(self) -> None:
        """Let the process end; not a collective."""
        self._setting_up.join()
        self._pipe.close()
        if self._arrived is not None:
            self._arrived.synchronize()  # before the memory goes
        if self._on_gpu:
            _unpin(self._memory)
        os.close(self._descriptor)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_SECONDS)

    def _receive(self) -> _Answer:
        try:
            answer: _Answer = self._pipe.recv()
            return answer
        except (EOFError, OSError):
            return _Answer(False, self._death())

    def _death(self) -> str:
        return (
            f"the process that writes checkpoints ended with exit code {self._process.wait()} "
            "(out of memory? see dmesg); checkpoint.async=false does without it"
        )


@dataclass(frozen=True)
class _Answer:
    """How a save ended."""

    is_users: bool
    error: str | None = None


def _serve(pipe: Connection) -> None:
    """The process: save what is in the memory whenever it is told to."""
    setup: _Setup = pipe.recv()
    die_with_parent(setup.parent)
    os.nice(5)  # decoding and launching come first
    with Path(setup.memory).open("r+b") as file:
        memory = mmap.mmap(file.fileno(), setup.num_bytes)
    tensors = _tensors_in(memory, setup.slots)
    if setup.place is not None:
        address, port, rank, world_size = setup.place
        store = TCPStore(address, port, timeout=_PATIENCE)
        torch_dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=_PATIENCE
        )
    while True:
        try:
            step, meta, metric = pipe.recv()
        except EOFError:
            return
        answer = _Answer(False)
        try:
            setup.saver.save(step, tensors, meta, metric=metric, plan=setup.plan)
        except UserError as exc:
            answer = _Answer(True, str(exc))
        except Exception:  # noqa: BLE001 - the rank raises it
            answer = _Answer(False, traceback.format_exc())
        pipe.send(answer)


def _start(theirs: Connection) -> subprocess.Popen[bytes]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    # Blocked signals stay blocked in the process; this one gets what comes meanwhile afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _UNWANTED_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep.checkpoint.writer", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()


def _meeting_point() -> tuple[Any, tuple[str, int, int, int] | None]:
    """Where the writers of all ranks find each other, kept alive by rank 0. All ranks enter."""
    if not dist.is_distributed():
        return None, None
    address = os.environ.get("MASTER_ADDR", "localhost")
    store = None
    if dist.is_main():
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = dist.broadcast_object(store.port if store is not None else 0)
    return store, (address, port, dist.rank(), dist.world_size())


def _share(tensors: Tensors) -> list[tuple[str, str]]:
    """Group and name of what this rank saves: its shards, and a part of what all ranks have alike.

    Without that, each process of a node would hold a whole copy in host memory.
    """
    loads = [0] * dist.world_size()
    mine = []
    keys = [(group, name) for group, items in tensors.items() for name in items]
    # The largest first, each to whom has least: the same on every rank.
    for group, name in sorted(keys, key=lambda key: -tensors[key[0]][key[1]].numel()):
        tensor = tensors[group][name]
        if isinstance(tensor, DTensor):
            mine.append((group, name))
            continue
        owner = loads.index(min(loads))
        loads[owner] += tensor.numel() * tensor.element_size()
        if owner == dist.rank():
            mine.append((group, name))
    return mine


def _only(tensors: Tensors, share: list[tuple[str, str]]) -> Tensors:
    kept: Tensors = {}
    for group, name in share:
        kept.setdefault(group, {})[name] = tensors[group][name]
    return kept


def _layout(tensors: Tensors) -> tuple[list[_Slot], int]:
    slots, offset = [], 0
    for group, items in tensors.items():
        for name, tensor in items.items():
            local = shards.local(tensor)
            slots.append(_Slot(group, name, local.dtype, tuple(local.shape), offset))
            size = local.numel() * local.element_size()
            offset += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
    return slots, max(offset, _ALIGN_BYTES)


def _tensors_in(memory: mmap.mmap, slots: list[_Slot]) -> Tensors:
    tensors: Tensors = {}
    for slot in slots:
        count = torch.Size(slot.shape).numel()
        # Each with a storage of its own size, or it would be copied before it is written.
        tensor = (
            torch.frombuffer(memory, dtype=slot.dtype, count=count, offset=slot.offset)
            if count
            else torch.empty(0, dtype=slot.dtype)
        )
        tensors.setdefault(slot.group, {})[slot.name] = tensor.view(slot.shape)
    return tensors


def _pin(memory: mmap.mmap) -> None:
    """Let the GPU copy straight into it. Where that is refused, copies are slower but right."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)


def _unpin(memory: mmap.mmap) -> None:
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    torch.cuda.cudart().cudaHostUnregister(address)


if __name__ == "__main__":
    # What is pickled by the rank names the module, not __main__.
    from lockstep.checkpoint.writer import _serve as serve

    serve(Connection(int(sys.argv[1])))
