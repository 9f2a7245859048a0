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
from lockstep.memory import SharedMemory, attach
from lockstep.parent import UNWANTED_SIGNALS, die_with_parent

_ALIGN_BYTES = 4096
_CHUNK_BYTES = 256 * 2**20
"""Copied from the GPU at a time: other copies from it pass in between."""
_GPU_RESERVE = 0.05
"""Of the GPU's memory that stays free when it holds a second copy of the state."""
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
        slots, num_gpu_bytes, num_bytes = _layout(tensors)
        self._shared = SharedMemory(num_bytes, pinned=num_gpu_bytes > 0)
        self._host = _tensors_in(self._shared.memory, slots)
        self._gpu: _GpuSide | None = None
        if num_gpu_bytes:
            self._gpu = _GpuSide(self._shared.tensor()[:num_gpu_bytes], self._host, slots)
        self._answer: _Answer | None = None
        self._busy = False
        self._store, place = _meeting_point()
        setup = _Setup(
            os.getpid(),
            self._shared.path,
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
        self._sending = self._setting_up

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
        gpu_pairs = []
        for group, items in _only(tensors, self._share).items():
            for name, tensor in items.items():
                local = shards.local(tensor)
                if local.is_cuda:
                    gpu_pairs.append(((group, name), local))
                else:
                    self._host[group][name].copy_(local)
        if self._gpu is not None:
            self._gpu.copy(gpu_pairs, changing)

    def fence(self) -> None:
        """Let the device finish the copies before it runs what is queued next; the host goes on."""
        if self._gpu is not None:
            self._gpu.fence()

    def begin(self, step: int, meta: dict[str, Any], metric: float | None) -> None:
        """Write the copies as soon as they have arrived."""
        assert not self._busy
        self._busy, self._answer = True, None
        # In a thread: the host has steps to queue while large copies are under way.
        self._sending = threading.Thread(
            target=self._send, args=((step, meta, metric),), daemon=True
        )
        self._sending.start()

    def _send(self, order: tuple[int, dict[str, Any], float | None]) -> None:
        try:
            if self._gpu is not None:
                self._gpu.wait()
            self._setting_up.join()
            with suppress(OSError):  # a process that has died is told when the answer is read
                self._pipe.send(order)
        except Exception:  # noqa: BLE001 - the rank raises it; it must not wait for an answer
            self._answer = _Answer(False, traceback.format_exc())

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
        self._sending.join()
        answer = self._answer or self._receive()
        self._busy, self._answer = False, None
        if answer.error is not None:
            raise (UserError if answer.is_users else RuntimeError)(answer.error)

    def close(self) -> None:
        """Let the process end; not a collective."""
        for thread in (self._setting_up, self._sending):
            thread.join(_FAREWELL_SECONDS)
        self._pipe.close()
        if self._gpu is not None:
            self._gpu.wait()  # before the memory goes
        self._shared.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_FAREWELL_SECONDS)

    def _receive(self) -> _Answer:
        try:
            answer: _Answer = self._pipe.recv()
            return answer
        except (EOFError, OSError):
            return _Answer(False, self._death())

    def _death(self) -> str:
        code = self._process.wait()
        how = (
            f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        return (
            f"the process that writes checkpoints {how} (out of memory? see dmesg); "
            "checkpoint.async=false does without it"
        )


class _GpuSide:
    """Copies from a GPU into the common memory.

    Where a second copy of the state fits on the GPU, it is made there first, in milliseconds, and
    what follows need not wait for the slow way to the host.
    """

    def __init__(self, memory: torch.Tensor, host: Tensors, slots: list[_Slot]) -> None:
        """
        Args:
            memory: the part of the common memory that is for tensors from the GPU, uint8.
            host: the tensors in it.
        """
        self._memory = memory
        self._host = host
        self._stream = torch.cuda.Stream()
        self._arrived: torch.cuda.Event | None = None
        self._sources: list[torch.Tensor] = []
        self._twin = _second_copy(memory.numel())
        self._twins: dict[tuple[str, str], torch.Tensor] = {}
        for slot in slots:
            end = slot.offset + torch.Size(slot.shape).numel() * slot.dtype.itemsize
            if self._twin is not None and end <= memory.numel():
                part = self._twin[slot.offset : end].view(slot.dtype)
                self._twins[slot.group, slot.name] = part.view(slot.shape)

    def copy(
        self,
        pairs: list[tuple[tuple[str, str], torch.Tensor]],
        changing: Collection[torch.Tensor],
    ) -> None:
        """Queue the copies: group and name, and the tensor."""
        training = torch.cuda.current_stream()
        if self._twin is not None:
            if self._arrived is not None:  # of a save that was given up
                training.wait_event(self._arrived)
            twins = [self._twins[key] for key, _ in pairs]
            torch._foreach_copy_(twins, [tensor for _, tensor in pairs])
        else:
            early = {tensor.data_ptr() for tensor in changing if tensor.is_cuda}
            pairs = [(key, t.clone() if t.data_ptr() in early else t) for key, t in pairs]
            self._sources = [tensor for _, tensor in pairs]
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            if self._twin is not None:
                for there, here in zip(
                    self._memory.split(_CHUNK_BYTES), self._twin.split(_CHUNK_BYTES), strict=True
                ):
                    there.copy_(here, non_blocking=True)
            else:
                for (group, name), tensor in pairs:
                    self._host[group][name].copy_(tensor, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def fence(self) -> None:
        """Let what is queued next wait until the state may change."""
        arrived = self._arrived  # another thread may be in wait()
        if arrived is not None and self._twin is None:
            torch.cuda.current_stream().wait_event(arrived)

    def wait(self) -> None:
        """Wait for the copies."""
        if self._arrived is not None:
            self._arrived.synchronize()
        self._arrived, self._sources = None, []


def _second_copy(num_bytes: int) -> torch.Tensor | None:
    """Memory on the GPU for it, kept for the run; None where training may need it."""
    free, total = torch.cuda.mem_get_info()
    if free - num_bytes < _GPU_RESERVE * total:
        return None
    return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")


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
    tensors = _tensors_in(attach(setup.memory), setup.slots)
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
    before = signal.pthread_sigmask(signal.SIG_BLOCK, UNWANTED_SIGNALS)
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


def _layout(tensors: Tensors) -> tuple[list[_Slot], int, int]:
    """The slots, and the bytes of those on a GPU, which come first, and of all."""
    slots, offset, num_gpu_bytes = [], 0, 0
    items = [
        (group, name, shards.local(t)) for group in tensors for name, t in tensors[group].items()
    ]
    for group, name, local in sorted(items, key=lambda item: not item[2].is_cuda):
        slots.append(_Slot(group, name, local.dtype, tuple(local.shape), offset))
        size = local.numel() * local.element_size()
        offset += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        if local.is_cuda:
            num_gpu_bytes = offset
    return slots, num_gpu_bytes, max(offset, _ALIGN_BYTES)


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


if __name__ == "__main__":
    # What is pickled by the rank names the module, not __main__.
    from lockstep.checkpoint.writer import _serve as serve

    serve(Connection(int(sys.argv[1])))
