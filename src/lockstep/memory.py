"""Memory that several processes see, that the GPU copies from, that is used again. Level 0."""

from __future__ import annotations

import gc
import math
import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch


class SharedMemory:
    """Some bytes that another process maps by :attr:`path` for as long as this one keeps them."""

    def __init__(self, num_bytes: int, *, pinned: bool = False) -> None:
        """
        Args:
            pinned: let the GPU copy straight into it. Where that is refused, copies are slower but
                right.
        """
        self._descriptor = os.memfd_create("lockstep")
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = mmap.mmap(self._descriptor, num_bytes)
        self._pinned = pinned and _register(self.tensor())

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def path(self) -> str:
        """What another process of this user gives to :func:`attach`."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def tensor(self) -> torch.Tensor:
        """All of it, [bytes] uint8."""
        return torch.frombuffer(self.memory, dtype=torch.uint8)

    def close(self) -> None:
        """Give it back, once the GPU is done with it; whoever has mapped it keeps it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor().data_ptr())
            self._pinned = False
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _register(memory: torch.Tensor) -> bool:
    """Whether the GPU may copy straight into it now."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)) == 0:
        return True
    # The next launch of a kernel would raise what was refused here: let it be one of no use.
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def attach(path: str) -> mmap.mmap:
    """Map another process's :class:`SharedMemory`."""
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


class Recycled:
    """Host memory for one large tensor after the other.

    The allocator gives large pieces back to the system, and to get fresh ones costs as long as
    filling them with images.
    """

    def __init__(self) -> None:
        self._kept: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 tensor of any content, in memory that no other living tensor looks at."""
        count = math.prod(shape)
        fits = (i for i in range(len(self._kept)) if self._is_free(i, count))
        at = next(fits, None)
        kept = np.empty(count, dtype=np.float32) if at is None else self._kept.pop(at)
        # One more that is free is for a batch that is held while the next is made.
        idle = [i for i in range(len(self._kept)) if self._is_free(i, 0)]
        for i in reversed(idle[1:]):
            del self._kept[i]
        self._kept.append(kept)
        return torch.from_numpy(kept)[:count].view(shape)

    def _is_free(self, at: int, count: int) -> bool:
        # This list and the call: the storage of a tensor, and so all its views, would be a third.
        return len(self._kept[at]) >= count and sys.getrefcount(self._kept[at]) == 2


@contextmanager
def garbage_when_told() -> Iterator[None]:
    """Within, Python looks for cyclic garbage when ``gc.collect`` is called, and never by itself.

    By itself it would in the middle of a step, on each rank in another one, and all would wait.
    """
    was_enabled = gc.isenabled()
    keep_all()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def keep_all() -> None:
    """Not look any more at what is there now (modules, the model): looking then takes no time."""
    gc.collect()
    gc.freeze()
