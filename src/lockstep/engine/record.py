"""From device-side sums to records, without making the device wait.

Each step's sums are reduced on the device and copied to the host behind the computation. They are
read a fixed number of steps later, the same on all ranks, so that decisions taken from them (stop,
non-finite loss) are taken by all ranks at the same step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lockstep import dist
from lockstep.engine.step import StepSums, digest_text
from lockstep.errors import UserError


@dataclass
class _Pending:
    record: dict[str, Any]
    host: torch.Tensor
    ready: torch.cuda.Event | None
    window: int


class Recorder:
    """Turns step sums into ``metrics.jsonl`` step records."""

    def __init__(
        self,
        device: torch.device,
        emit: Callable[[dict[str, Any]], None],
        *,
        all_samples_count: bool,
        overflow_is_skipped: bool,
    ) -> None:
        """
        Args:
            emit: takes a finished record, in step order.
            all_samples_count: no sample may be left out (``data.on_error=stop``).
            overflow_is_skipped: a non-finite gradient changes no weights (fp16's loss scaler).
        """
        self._device = device
        self._emit = emit
        self._exact = all_samples_count
        self._overflow_is_skipped = overflow_is_skipped
        self._lag = 2 if device.type == "cuda" else 0
        self._pending: deque[_Pending] = deque()
        self.stop_requested = False
        self.restart_clock()

    def restart_clock(self, waited: float = 0.0) -> None:
        """Leave the time since the last step (an evaluation, a save) out of the speed."""
        self._clock = time.perf_counter()
        self._waited = waited

    def submit(
        self,
        record: dict[str, Any],
        sums: StepSums,
        norm: torch.Tensor,
        *,
        window: int,
        waited: float,
        stop: bool,
    ) -> None:
        """Reduce and queue one step, then finish the one ``lag`` steps back. All ranks enter here.

        Args:
            record: what the host knows already (step, epoch, lr, samples_seen).
            norm: global gradient norm, 0-d on the device.
            window: samples of the step over all ranks.
            waited: cumulative seconds this rank waited for data.
            stop: whether this rank was asked to stop.
        """
        now = time.perf_counter()
        seconds = max(now - self._clock, 1e-9)
        record["samples_per_second"] = window / seconds
        record["data_wait_fraction"] = min(1.0, (waited - self._waited) / seconds)
        self._clock, self._waited = now, waited

        counts = torch.tensor([sums.samples, *sums.digest, float(stop)], dtype=torch.float64)
        if self._device.type == "cuda":
            counts = counts.pin_memory().to(self._device, non_blocking=True)
        reduced = dist.all_reduce_sum_(torch.cat([sums.loss.double().view(1), counts]))
        values = torch.cat([reduced, norm.double().view(1).to(reduced.device)])
        ready = None
        host = values
        if self._device.type == "cuda":
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            host.copy_(values, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        self._pending.append(_Pending(record, host, ready, window))
        while len(self._pending) > self._lag:
            self._finish(self._pending.popleft())

    def settle(self) -> None:
        """Finish all queued steps: before an evaluation, a save or the end."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, item: _Pending) -> None:
        if item.ready is not None:
            item.ready.synchronize()
        loss, samples, *digest, stop, norm = item.host.tolist()
        if self._exact and round(samples) != item.window:
            raise AssertionError(f"step of {item.window} samples counted {samples}")
        record = item.record
        record["loss"] = loss / max(samples, 1.0)
        record["grad_norm"] = norm
        record["sample_digest"] = digest_text(digest)
        self._emit(record)
        self.stop_requested |= stop > 0
        broken = None
        if not math.isfinite(loss):
            broken = f"the loss is {record['loss']}"
        elif not math.isfinite(norm) and not self._overflow_is_skipped:
            broken = f"the gradient norm is {norm}"
        if broken is not None:
            raise UserError(
                f"step {record['step']}: {broken} (learning rate {record['lr']:g}); nothing was "
                "saved after it. Lower optimizer.lr, set optimizer.clip_grad_norm, or use "
                "precision=bf16 instead of fp16"
            )
