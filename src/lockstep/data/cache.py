"""Decoded images that stay in memory: of a process and its workers, or of the device that trains. Level 2."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch

from lockstep import dist
from lockstep.data.decode import DecodeError
from lockstep.errors import UserError

AUTO_BYTES = 256 * 2**20
"""``data.cache=auto``: a split that is not larger than this when decoded stays decoded."""
_WINDOW = 256
"""Images that are decoded ahead of their copy to the device."""


class RamCache:
    """Images of a split that fits as a whole; one that does not is not kept at all.

    Lies in memory that processes forked after it was made see, too.
    """

    def __init__(self, count: int, kind: str) -> None:
        """
        Args:
            count: images of the split.
            kind: ``data.cache``; with ``ram``, this process's share of half the free memory.
        """
        limit = AUTO_BYTES if kind == "auto" else 0
        if kind == "ram":
            limit = _free_bytes(torch.device("cpu")) // 2 // dist.local_world_size()
        self._limit = limit
        if not limit:
            return
        # Takes no memory before it is written to.
        self._pixels = mmap.mmap(-1, limit)
        self._places = _shared_zeros((count, 3))
        """Where each image ends, its height and width; 0: not there."""
        self._used = _shared_zeros((1,))
        self._lock = get_context("fork").Lock()

    def get(self, index: int) -> np.ndarray | None:
        """[H, W, 3] uint8."""
        if not self._limit or self._is_full:
            return None
        with self._lock:
            end, height, width = self._places[index].tolist()
        if not end:
            return None
        size = height * width * 3
        pixels = np.frombuffer(self._pixels, np.uint8, size, end - size).copy()
        # Whoever finds it full says so first and throws the pixels away then.
        return None if self._is_full else pixels.reshape(height, width, 3)

    def put(self, index: int, image: np.ndarray) -> None:
        """Keep an image; from the first on that does not fit, none is kept."""
        if not self._limit:
            return
        with self._lock:
            if self._is_full or self._places[index, 0]:
                return
            start = int(self._used[0])
            self._used[0] += image.nbytes
            if self._is_full:
                if hasattr(mmap, "MADV_REMOVE"):  # elsewhere the memory is kept for nothing
                    self._pixels.madvise(mmap.MADV_REMOVE)
                return
            end = start + image.nbytes
            self._pixels[start:end] = np.ascontiguousarray(image).tobytes()
            self._places[index] = (end, *image.shape[:2])

    @property
    def takes_more(self) -> bool:
        """Whether an image that is decoded whole will be kept, as far as is known."""
        return bool(self._limit) and not self._is_full

    @property
    def _is_full(self) -> bool:
        return bool(self._used[0] > self._limit)


def _shared_zeros(shape: tuple[int, ...]) -> np.ndarray:
    """int64."""
    memory = mmap.mmap(-1, max(8 * math.prod(shape), 1))
    return np.frombuffer(memory, np.int64, math.prod(shape)).reshape(shape)


class DeviceCache:
    """All images of a split, each as it was decoded, in the memory of the device that trains."""

    def __init__(
        self,
        count: int,
        load: Callable[[int], np.ndarray],
        *,
        device: torch.device,
        threads: int,
    ) -> None:
        """
        Args:
            load: an image by its index, [H, W, 3] uint8.

        Raises:
            UserError: they do not fit, or what ``load`` raises other than DecodeError.
        """
        self.reasons: dict[int, str] = {}
        """Why an image could not be read."""
        self._images: list[torch.Tensor] = []
        left = _free_bytes(device) // 2

        def attempt(index: int) -> np.ndarray | str:
            try:
                return load(index)
            except DecodeError as error:
                return str(error)

        with ThreadPoolExecutor(threads) as pool:
            for first in range(0, count, _WINDOW):
                for found in pool.map(attempt, range(first, min(first + _WINDOW, count))):
                    if isinstance(found, str):
                        self.reasons[len(self._images)] = found
                        found = np.zeros((1, 1, 3), dtype=np.uint8)
                    left -= found.nbytes
                    if left < 0:
                        raise UserError(
                            f"data.cache = gpu: the decoded images do not fit, only "
                            f"{len(self._images):,} of {count:,} into half of the memory that is "
                            "free on the device; use data.cache=off"
                        )
                    self._images.append(torch.from_numpy(found).to(device))

    def __getitem__(self, index: int) -> torch.Tensor:
        """[H, W, 3] uint8, on the device."""
        return self._images[index]


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvail"))
    with suppress(OSError, ValueError):  # "max" where a container has no limit
        limit, used = (
            int(Path("/sys/fs/cgroup", name).read_text())
            for name in ("memory.max", "memory.current")
        )
        free = min(free, max(limit - used, 0))
    return free
