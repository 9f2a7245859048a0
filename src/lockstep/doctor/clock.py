"""When steps are timed: the first, the rest of the warm-up, repeats, then a few under a profiler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep import dist
from lockstep.doctor.profile import summary

_PROFILED_STEPS = 5


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    steps: int
    """Of one repeat."""
    repeat: int
    warmup: int
    """Steps before the first repeat; the first of them compiles."""
    profile: bool

    @property
    def total_steps(self) -> int:
        """All that a case trains."""
        return self.timed_steps + (_PROFILED_STEPS if self.profile else 0)

    @property
    def timed_steps(self) -> int:
        """With the warm-up, without what the profiler sees."""
        return self.warmup + self.repeat * self.steps


class Clock:
    """Times steps from outside: :meth:`tick` before each of them, and once behind the last."""

    def __init__(self, effort: Effort, device: torch.device) -> None:
        self._effort = effort
        self._device = device
        repeats = [effort.warmup + i * effort.steps for i in range(effort.repeat + 1)]
        self._marks = {0, 1, *repeats}
        self._times: dict[int, float] = {}
        self._done = 0
        self._profiler: profile | None = None
        self._profile: dict[str, Any] | None = None
        self._memory_bytes: int | None = None

    def tick(self) -> bool:
        """Whether it is enough. Waits for the device where a time is taken."""
        done, effort = self._done, self._effort
        self._done += 1
        if done in self._marks:
            self._synchronize()
            self._times[done] = time.perf_counter()
        if done == effort.timed_steps:
            # Before the profiler: it takes memory of its own.
            self._memory_bytes = self._peak_bytes()
            self._profiler = self._start_profiler() if effort.profile else None
        if done == effort.total_steps and self._profiler is not None:
            self._synchronize()
            self._profiler.stop()
            self._profile = summary(self._profiler, _PROFILED_STEPS)
        return done == effort.total_steps

    def result(self) -> dict[str, Any]:
        """Plain figures of this process: seconds of the first step, the warm-up, each repeat."""
        at, effort = self._times, self._effort
        bounds = [effort.warmup + i * effort.steps for i in range(effort.repeat + 1)]
        on_gpu = self._device.type == "cuda"
        return {
            "first_step_seconds": at[1] - at[0],
            "warmup_seconds": at[effort.warmup] - at[0],
            "repeat_seconds": [at[b] - at[a] for a, b in pairwise(bounds)],
            "memory_bytes": self._memory_bytes,
            "gpu": torch.cuda.get_device_name(self._device) if on_gpu else None,
            "profile": self._profile,
        }

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _peak_bytes(self) -> int | None:
        """Most that tensors took on any GPU of this process (DataParallel has several)."""
        if self._device.type != "cuda":
            return None
        alone = dist.world_size() == 1
        gpus = range(torch.cuda.device_count()) if alone else [self._device]
        return max(int(torch.cuda.max_memory_allocated(gpu)) for gpu in gpus)

    def _start_profiler(self) -> profile:
        on_gpu = self._device.type == "cuda"
        kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        profiler = profile(activities=kinds)
        profiler.start()
        return profiler
