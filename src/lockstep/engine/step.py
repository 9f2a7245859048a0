"""One optimiser step: micro-batches in, one update and a few device-side sums out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np
import torch
import torch.nn.functional as F

from lockstep import dist
from lockstep.config.schema import Precision
from lockstep.data.loader import Batch
from lockstep.engine.graphs import PassGraphs
from lockstep.engine.state import TrainState
from lockstep.strategy.base import Strategy
from lockstep.strategy.precision import autocast

DIGEST_PARTS = 4
_PART = 1 << 24
"""Digest parts are summed in float64: 24 bits stay exact over 2**29 ranks."""


class SampleLosses:
    """Each sample's loss of this rank's part of a step, on the device until somebody asks."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = []

    def add(self, ids: np.ndarray, losses: torch.Tensor, weights: torch.Tensor) -> None:
        """Take a micro-batch: losses and weights [n], ids of those whose weight is not 0."""
        self._parts.append((ids, losses, weights))

    def not_finite(self) -> tuple[list[int], int]:
        """Ids of the samples whose loss is NaN or infinite, and of how many. Waits for the device."""
        found: list[int] = []
        for ids, losses, weights in self._parts:
            counted = losses[weights > 0].isfinite().cpu().numpy()
            found += [int(i) for i in ids[~counted]]
        return found, sum(len(ids) for ids, _, _ in self._parts)


class Stopwatch:
    """Seconds of the device between :meth:`start` and :meth:`stop`, all in all."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        if self._on_gpu:
            self._events.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
            self._events[-1][0].record()
        else:
            self._seconds -= time.perf_counter()

    def stop(self) -> None:
        if self._on_gpu:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter()

    def seconds(self) -> float:
        """To be asked when the device has finished the work."""
        return self._seconds + sum(float(a.elapsed_time(b)) for a, b in self._events) / 1000


@dataclass
class StepSums:
    """What this rank adds to one optimiser step; sums over ranks describe the whole step."""

    loss: torch.Tensor
    """0-d float32 on the device: sum of per-sample losses."""
    forward: Stopwatch
    losses: SampleLosses = field(default_factory=SampleLosses)
    samples: int = 0
    digest: np.ndarray = field(default_factory=lambda: np.zeros(DIGEST_PARTS, dtype=np.float64))

    @classmethod
    def on(cls, device: torch.device) -> StepSums:
        """Nothing yet."""
        return cls(torch.zeros((), device=device), Stopwatch(device))


def micro_step(
    state: TrainState,
    strategy: Strategy,
    precision: Precision,
    batch: Batch,
    sums: StepSums,
    *,
    window: int,
    last: bool,
    label_smoothing: float,
    graphs: PassGraphs | None,
    enter: Callable[[str], None],
) -> None:
    """Forward and backward of one micro-batch; ``enter`` hears which of them begins.

    Each sample's loss is divided by ``window``, the sample count of the whole optimiser step, and
    the strategy's averaging over ranks is undone, so the gradients add up to the exact mean
    whatever the slices. A weight of 0 (dummy, unreadable image) removes a sample.
    """
    dummy = batch.slice.start == batch.slice.stop
    if len(batch.images) == 1 and state.statistics.buffers:
        batch = _doubled(batch)
    if not dummy:
        state.statistics.before_micro_batch(batch.slice.index)
    # Whatever draws from the global generator (dropout) depends on the position, not on the rank.
    torch.manual_seed(int(batch.seeds_host[0]))

    def forward(*of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        images, targets, weights, seeds = of
        with autocast(precision, images.device):
            logits = state.module(images, seeds=seeds)
        losses = F.cross_entropy(
            logits.float(), targets, reduction="none", label_smoothing=label_smoothing
        )
        return (losses * weights).sum(), losses

    def both(*of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, losses = forward(*of[:-1])
        (loss * of[-1]).backward()
        return loss.detach(), losses.detach()

    factor = strategy.loss_factor * state.scaler.scale / window
    inputs = (batch.images, batch.targets, batch.weights, batch.seeds)
    with strategy.micro_batch(last=last):
        enter("forward")
        sums.forward.start()
        if graphs is not None and not dummy:
            loss, losses = graphs(both, (*inputs, torch.full_like(sums.loss, factor)))
            losses = losses.clone()
            sums.forward.stop()
        else:
            with state.statistics.unchanged() if dummy else nullcontext():
                loss, losses = forward(*inputs)
            sums.forward.stop()
            enter("backward")
            (loss * factor).backward()
    sums.loss += loss.detach()
    sums.losses.add(batch.ids, losses.detach(), batch.weights)
    sums.samples += len(batch.ids)
    sums.digest = (sums.digest + digest_of(batch.ids)) % _PART


def update(
    state: TrainState,
    strategy: Strategy,
    *,
    lr: float,
    clip: float | None,
    num_micro_batches: int,
    leave_out: bool,
    check_loss: torch.Tensor | None,
) -> torch.Tensor:
    """Clip, step, average. Returns the gradient norm before clipping, 0-d float32 on the device.

    Args:
        leave_out: change nothing.
        check_loss: this rank's loss of the step; change nothing if it or the norm is not finite on
            any rank, which waits for the device. None: do not look.
    """
    parameters = [p for p in state.model.parameters() if p.requires_grad]
    strategy.reduce_gradients(parameters)
    norm = strategy.grad_norm(parameters)
    apply = state.scaler.scale
    good = state.scaler.step_is_good(norm)
    norm = norm / apply
    if check_loss is not None and not leave_out:
        loss = dist.all_reduce_sum_(check_loss.clone())
        # The loss scaler has its own way with the norm.
        leave_out = not bool(loss.isfinite() & (norm.isfinite() | state.scaler.enabled))
    if good and not leave_out:
        factor = None
        if clip is not None:
            factor = (clip / (norm + 1e-6)).clamp(max=1.0) / apply
        elif apply != 1.0:
            factor = torch.full_like(norm, 1.0 / apply)
        if factor is not None:
            grads = [dist.local_part(p.grad) for p in parameters if p.grad is not None]
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        for group in state.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(lr)  # torchao insists
            else:
                group["lr"] = lr
        state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)
    progress = state.progress
    progress.step += 1
    if leave_out:
        state.statistics.undo_window()
    else:
        state.statistics.end_window(num_micro_batches)
        progress.micro_batches += num_micro_batches
        if state.ema is not None:
            state.ema.update(progress.step)
    return norm.detach().float()


def digest_of(ids: Iterable[int]) -> np.ndarray:
    """Order-free digest of sample ids: four 24-bit sums of hashes, [4] float64.

    Being a sum, it can be reduced over ranks and says what was computed, not what was planned.
    """
    total = np.zeros(DIGEST_PARTS, dtype=np.uint64)
    for i in ids:
        raw = blake2b(int(i).to_bytes(8, "little"), digest_size=3 * DIGEST_PARTS).digest()
        parts = [int.from_bytes(raw[3 * k : 3 * k + 3], "little") for k in range(DIGEST_PARTS)]
        total += np.array(parts, dtype=np.uint64)
    return (total % _PART).astype(np.float64)


def digest_text(parts: Iterable[float]) -> str:
    """Reduced digest parts as 24 hexadecimal digits."""
    return "".join(f"{int(p) % _PART:06x}" for p in parts)


def _doubled(batch: Batch) -> Batch:
    """A lone sample twice, the copy with weight 0: BatchNorm refuses one value per channel."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])

    weights = torch.cat([batch.weights, torch.zeros_like(batch.weights)])
    images, targets, seeds = twice(batch.images), twice(batch.targets), twice(batch.seeds)
    return replace(batch, images=images, targets=targets, seeds=seeds, weights=weights)
