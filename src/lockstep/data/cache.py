"""Decoded images that stay in memory: in the process, or on the device that trains. Level 2."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

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
    """Images of a split that fits as a whole; one that does not is not kept at all."""

    def __init__(self, kind: str) -> None:
        """
        Args:
            kind: ``data.cache``; with ``ram``, this process's share of half the free memory.
        """
        self._images: dict[int, np.ndarray] = {}
        self._left = AUTO_BYTES if kind == "auto" else -1
        if kind == "ram":
            self._left = _free_bytes(torch.device("cpu")) // 2 // dist.local_world_size()
        self._lock = Lock()

    def get(self, index: int) -> np.ndarray | None:
        return self._images.get(index)

    def put(self, index: int, image: np.ndarray) -> None:
        with self._lock:
            if self._left < 0 or index in self._images:
                return
            self._left -= image.nbytes
            if self._left < 0:
                self._images = {}
            else:
                self._images[index] = image


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
