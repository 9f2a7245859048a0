"""From device-side sums to records, without making the device wait.

Each step's sums are reduced on the device and copied to the host behind the computation. They are
read a fixed number of steps later, the same on all ranks, so that decisions taken from them (stop,
non-finite loss) are taken by all ranks at the same step.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lockstep import dist
from lockstep.checkpoint.store import Store
from lockstep.engine.guard import PHASES, StepGuard, StragglerWatch
from lockstep.engine.step import DIGEST_PARTS, StepSums, digest_text
from lockstep.errors import UserError
from lockstep.telemetry import Telemetry


@dataclass
class _Pending:
    record: dict[str, Any]
    host: torch.Tensor
    ready: torch.cuda.Event | None
    window: int
    sums: StepSums
    own_seconds: dict[str, float]
    step_seconds: float
    left_out: bool


class Recorder:
    """Turns step sums into ``metrics.jsonl`` step records, and has them judged."""

    def __init__(
        self,
        device: torch.device,
        telemetry: Telemetry,
        store: Store,
        guard: StepGuard,
        stragglers: StragglerWatch,
        *,
        all_samples_count: bool,
        overflow_is_skipped: bool,
    ) -> None:
        """
        Args:
            telemetry: takes the finished records, in step order.
            store: is told which steps turned out well.
            all_samples_count: no sample may be left out (``data.on_error=stop``).
            overflow_is_skipped: a non-finite gradient changes no weights (fp16's loss scaler).
        """
        self._device = device
        self._telemetry = telemetry
        self._store = store
        self._guard = guard
        self._stragglers = stragglers
        self._exact = all_samples_count
        self._overflow_is_skipped = overflow_is_skipped
        self._lag = 2 if device.type == "cuda" else 0
        self._pending: deque[_Pending] = deque()
        self._last_seconds = [0.0] * len(PHASES)
        """This rank's own seconds of the last finished step: those of the current one are not
        known before the device has done it."""
        self._told_of_missing = False
        self.stop_requested = False
        self.regroup_requested = False
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
        regroup: bool,
        left_out: bool,
    ) -> None:
        """Reduce and queue one step, then finish the one ``lag`` steps back. All ranks enter here.

        Args:
            record: what the host knows already (step, epoch, lr, samples_seen).
            norm: global gradient norm, 0-d on the device.
            window: samples of the step over all ranks.
            waited: cumulative seconds this rank waited for data.
            stop, regroup: whether this rank was asked to stop, or to make room for another node.
            left_out: the step changed no weights, on purpose.
        """
        now = time.perf_counter()
        seconds = max(now - self._clock, 1e-9)
        record["time"] = time.time()
        record["samples_per_second"] = window / seconds
        record["data_wait_fraction"] = min(1.0, (waited - self._waited) / seconds)
        own_seconds = {"data": waited - self._waited}
        self._clock, self._waited = now, waited

        everyone = np.zeros((dist.world_size(), len(PHASES)))
        everyone[dist.rank()] = self._last_seconds
        counts = torch.tensor(
            [sums.samples, *sums.digest, float(stop), float(regroup), *everyone.flat],
            dtype=torch.float64,
        )
        if self._device.type == "cuda":
            counts = counts.pin_memory().to(self._device, non_blocking=True)
        figures = torch.cat([sums.loss.double().view(1), counts])
        reduced = dist.all_reduce_sum_(figures)
        values = torch.cat([norm.double().view(1).to(reduced.device), reduced])
        ready = None
        host = values
        if self._device.type == "cuda":
            host = torch.empty_like(values, device="cpu", pin_memory=True)
            host.copy_(values, non_blocking=True)
            ready = torch.cuda.Event(blocking=True)  # a spinning wait takes a decoder's core
            ready.record()
        self._pending.append(
            _Pending(record, host, ready, window, sums, own_seconds, seconds, left_out)
        )
        while len(self._pending) > self._lag:
            self._finish(self._pending.popleft())

    @property
    def settled(self) -> bool:
        """Whether all submitted steps are finished."""
        return not self._pending

    def settle(self) -> None:
        """Finish all queued steps: before an evaluation, a save or the end."""
        while self._pending:
            self._finish(self._pending.popleft())

    def _finish(self, item: _Pending) -> None:
        if item.ready is not None:
            item.ready.synchronize()
        norm, loss, samples, *rest = item.host.tolist()
        digest, (stop, regroup, *everyone) = rest[:DIGEST_PARTS], rest[DIGEST_PARTS:]
        missing = item.window - round(samples)
        if self._exact and missing:
            raise AssertionError(f"step of {item.window} samples counted {samples}")
        record = item.record
        record["loss"] = loss / max(samples, 1.0)
        record["grad_norm"] = norm
        record["sample_digest"] = digest_text(digest)
        if missing == item.window > 1:  # a lone image, at an epoch's end, may be broken
            raise UserError(
                f"step {record['step']}: none of its {item.window} images can be read, so nothing is "
                "saved of it: look at them with python scripts/prepare_data.py check"
            )
        if missing and not self._told_of_missing:
            self._told_of_missing = True
            self._telemetry.message(
                f"step {record['step']}: {missing} of its {item.window} images cannot be read and are "
                "left out; the end of the run names all such images"
            )
        self._telemetry.step(record)
        self.stop_requested |= stop > 0
        self.regroup_requested |= regroup > 0
        broken = None
        if not math.isfinite(loss):
            broken = f"the loss is {record['loss']}"
        elif not math.isfinite(norm) and not self._overflow_is_skipped:
            broken = f"the gradient norm is {norm}"
        # Ranks may have uneven parts of a step: what it would take for an even one.
        even = item.window / dist.world_size() / max(item.sums.samples, 1)
        forward = item.sums.forward.seconds() * even if item.sums.samples else 0.0
        own = item.own_seconds | {"forward": forward}
        self._last_seconds = [own[phase] for phase in PHASES]
        notes = [
            self._guard.check(record, broken, item.sums.losses, left_out=item.left_out),
            self._stragglers.add(np.array(everyone).reshape(-1, len(PHASES)), item.step_seconds),
        ]
        for note in notes:
            if note is not None:
                self._telemetry.message(note)
        self._store.approve(record["step"])
