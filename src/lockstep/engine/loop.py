"""The training loop, by name and in reading order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from lockstep import dist
from lockstep.checkpoint.store import Store
from lockstep.config.plan import Plan
from lockstep.config.schema import Checkpoint, Evaluate, Optimizer, Precision, Schedule
from lockstep.data.loader import Batch, Loader
from lockstep.data.sampler import num_micro_batches, window_slices
from lockstep.engine.evaluate import evaluate
from lockstep.engine.record import Recorder
from lockstep.engine.state import Progress, TrainState
from lockstep.engine.step import StepSums, micro_step, update
from lockstep.errors import Stopped
from lockstep.metrics import EvalResult
from lockstep.optim.schedule import learning_rate
from lockstep.strategy.base import Strategy
from lockstep.telemetry import Telemetry


class StopRequest(Protocol):
    """Says whether this process was asked to stop."""

    @property
    def requested(self) -> str | None: ...


@dataclass
class Training:
    """All parts of a run, built by the worker."""

    plan: Plan
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    evaluation: Evaluate
    checkpoint: Checkpoint
    label_smoothing: float
    stop_at: int | None
    device: torch.device
    strategy: Strategy
    state: TrainState
    train_loader: Loader
    val_loader: Loader
    store: Store
    telemetry: Telemetry
    stop: StopRequest
    manifest: dict[str, Any]
    """Plain values that every checkpoint carries: law, data digests, versions."""
    results: dict[str, EvalResult] = field(default_factory=dict)
    """The last evaluation of "raw" and "ema" weights."""
    evaluated_step: int = -1
    saved_step: int = -1


def fit(t: Training) -> dict[str, EvalResult]:
    """Train to the last step; returns the last evaluation by kind of weights.

    Raises:
        Stopped: asked to stop; everything is saved.
    """
    progress, plan = t.state.progress, t.plan
    recorder = Recorder(
        t.device,
        t.telemetry.step,
        all_samples_count=t.train_loader.stops_on_error,
        overflow_is_skipped=t.state.scaler.enabled,
    )
    recorder.restart_clock(t.train_loader.wait_seconds)
    while progress.step < plan.total_steps:
        for window, batches in epoch_windows(t):
            record, sums, norm = train_window(t, window, batches)
            recorder.submit(
                record,
                sums,
                norm,
                window=window[1] - window[0],
                waited=t.train_loader.wait_seconds,
                stop=t.stop.requested is not None,
            )
            last = progress.step == plan.total_steps
            stopping = recorder.stop_requested or progress.step == t.stop_at
            if last or due(progress, t.evaluation.every_epochs, t.evaluation.every_steps):
                recorder.settle()
                run_evaluation(t)
                recorder.restart_clock(t.train_loader.wait_seconds)
            if (
                last
                or stopping
                or due(progress, t.checkpoint.every_epochs, t.checkpoint.every_steps)
            ):
                recorder.settle()
                save(t)
                recorder.restart_clock(t.train_loader.wait_seconds)
            if stopping and not last:
                raise Stopped(f"stopped after step {progress.step}; everything is saved")
    if not t.results:
        _evaluate_all(t)  # resumed after the last step: told before, but not to us
    return t.results


def epoch_windows(t: Training) -> Iterator[tuple[tuple[int, int], Iterator[Batch]]]:
    """The rest of the current epoch: each optimiser step's samples and this rank's batches.

    A window [start, stop) holds positions in the epoch's order; the last may be shorter.
    """
    plan, progress = t.plan, t.state.progress
    num_train = len(t.train_loader)
    starts = range(progress.consumed, num_train, plan.global_batch)
    starts = starts[: plan.total_steps - progress.step]
    bounds = [(s, min(s + plan.global_batch, num_train)) for s in starts]
    mine = [
        window_slices(start, stop, forward_size(plan), dist.rank(), dist.world_size())
        for start, stop in bounds
    ]
    stream = t.train_loader.batches(progress.epoch, [s for slices in mine for s in slices])
    try:
        for window, slices in zip(bounds, mine, strict=True):
            yield window, islice(stream, len(slices))
    finally:
        stream.close()


def train_window(
    t: Training, window: tuple[int, int], batches: Iterator[Batch]
) -> tuple[dict[str, Any], StepSums, torch.Tensor]:
    """One optimiser step; returns what the host knows of it, the sums and the gradient norm."""
    start, stop = window
    plan, progress = t.plan, t.state.progress
    micro = forward_size(plan)
    rounds = len(window_slices(start, stop, micro, dist.rank(), dist.world_size()))
    sums = StepSums(torch.zeros((), device=t.device))
    for i, batch in enumerate(batches):
        micro_step(
            t.state,
            t.strategy,
            t.precision,
            batch,
            sums,
            window=stop - start,
            last=i == rounds - 1,
            label_smoothing=t.label_smoothing,
        )
    lr = learning_rate(
        t.schedule,
        step=progress.step,
        total_steps=plan.total_steps,
        warmup_steps=plan.warmup_steps,
        peak=plan.peak_lr,
    )
    norm = update(
        t.state,
        t.strategy,
        lr=lr,
        clip=t.optimizer.clip_grad_norm,
        num_micro_batches=num_micro_batches(start, stop, micro, dist.world_size()),
    )
    epoch = progress.epoch + 1
    progress.samples_seen += stop - start
    progress.consumed = stop % len(t.train_loader)
    if progress.consumed == 0:
        progress.epoch += 1
    record = {
        "kind": "step",
        "step": progress.step,
        "epoch": epoch,
        "lr": lr,
        "samples_seen": progress.samples_seen,
    }
    return record, sums, norm


def run_evaluation(t: Training) -> None:
    """Evaluate raw and averaged weights and tell. All ranks enter here."""
    state = t.state
    _evaluate_all(t)
    for weights, result in t.results.items():
        t.telemetry.evaluation(
            {"kind": "eval", "step": state.progress.step, "weights": weights} | asdict(result)
        )
    top1 = main_result(t.results).top1
    if state.progress.best_top1 is None or top1 > state.progress.best_top1:
        state.progress.best_top1, state.progress.best_step = top1, state.progress.step
    t.evaluated_step = state.progress.step


def save(t: Training) -> None:
    """Save everything, unless this step is saved already. All ranks enter here."""
    state, step = t.state, t.state.progress.step
    if t.saved_step == step:
        return
    metric = main_result(t.results).top1 if t.evaluated_step == step else None
    with state.statistics.whole(state.ema.buffers if state.ema is not None else ()):
        state.statistics.set_batches_tracked(state.progress.micro_batches)
        t.store.save(step, state.tensors(), t.manifest | state.meta(), metric=metric)
    t.saved_step = step


def main_result(results: dict[str, EvalResult]) -> EvalResult:
    """The figure that stands for the run: of the averaged weights where there are any."""
    return results.get("ema", results["raw"])


def due(progress: Progress, every_epochs: int | None, every_steps: int | None) -> bool:
    """Whether something that happens every so many epochs or steps happens after this step."""
    at_epoch_end = progress.consumed == 0
    by_epoch = every_epochs is not None and at_epoch_end and progress.epoch % every_epochs == 0
    return by_epoch or (every_steps is not None and progress.step % every_steps == 0)


def forward_size(plan: Plan) -> int | None:
    """Samples of one process's forward pass: a micro-batch for each of its devices."""
    return plan.fixed_micro * plan.devices_per_process if plan.fixed_micro else None


def _evaluate_all(t: Training) -> None:
    state = t.state
    with state.statistics.whole():
        t.results["raw"] = _evaluate(t)
    if state.ema is not None:
        # Swapped first: what `whole` sums over ranks then are the averages' partial statistics.
        with state.ema.swapped(), state.statistics.whole():
            t.results["ema"] = _evaluate(t)


def _evaluate(t: Training) -> EvalResult:
    result = evaluate(
        t.state.module, t.val_loader, t.precision, batch=t.evaluation.batch, device=t.device
    )
    t.strategy.after_evaluation()
    return result
