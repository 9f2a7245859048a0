"""The training loop, by name and in reading order."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from lockstep import dist
from lockstep.checkpoint.store import Store
from lockstep.config.plan import Plan
from lockstep.config.schema import (
    Checkpoint,
    Evaluate,
    Guard,
    Optimizer,
    Precision,
    Schedule,
)
from lockstep.data.loader import Batch, Loader
from lockstep.data.sampler import num_micro_batches, window_slices
from lockstep.engine.evaluate import Interrupted, evaluate
from lockstep.engine.graphs import PassGraphs
from lockstep.engine.guard import StepGuard, StragglerWatch
from lockstep.engine.record import Recorder
from lockstep.engine.state import Progress, TrainState
from lockstep.engine.step import StepSums, micro_step, update
from lockstep.errors import Regroup, Stopped, UserError
from lockstep.memory import garbage_when_told, keep_all
from lockstep.metrics import EvalResult
from lockstep.optim.schedule import learning_rate
from lockstep.strategy.base import Strategy
from lockstep.telemetry import Telemetry
from lockstep.telemetry.phases import Phases

_LONG_WAIT_SECONDS = 1.0
"""For a disk, that a user should be told about."""
_GARBAGE_STEPS = 100


class StopRequest(Protocol):
    """Says whether this process was asked to stop."""

    @property
    def requested(self) -> str | None: ...

    @property
    def regroup(self) -> bool:
        """Whether the group shall form anew, because a node wants to join."""


@dataclass
class Training:
    """All parts of a run, built by the worker."""

    plan: Plan
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    evaluation: Evaluate
    checkpoint: Checkpoint
    guard: Guard
    label_smoothing: float
    stop_at: int | None
    device: torch.device
    strategy: Strategy
    state: TrainState
    graphs: PassGraphs | None
    train_loader: Loader
    val_loader: Loader
    store: Store
    telemetry: Telemetry
    phases: Phases
    stop: StopRequest
    manifest: dict[str, Any]
    """Plain values that every checkpoint carries: law, data digests, versions."""
    results: dict[str, EvalResult] = field(default_factory=dict)
    """The last evaluation of "raw" and "ema" weights."""
    saved_step: int = -1


def fit(t: Training) -> dict[str, EvalResult]:
    """Train to the last step; returns the last evaluation by kind of weights.

    Raises:
        Stopped: asked to stop; everything is saved. Regroup: alike, to go on in another group.
        RollBack: the guard wants to go back to the last checkpoint.
    """
    recorder = build_recorder(t)
    pause(t, recorder)
    began: float | None = time.perf_counter() if t.plan.compile != "off" else None
    with garbage_when_told():
        while t.state.progress.step < t.plan.total_steps:
            for window, batches in epoch_windows(t):
                train_window(t, window, batches, recorder)
                if began is not None:
                    tell_compiling(t, began)
                    began = None
                    keep_all()  # what compiling has left
                if t.store.wants_memory:
                    t.store.reserve(t.state.to_save()[0])
                if t.state.progress.step % _GARBAGE_STEPS == 0:
                    gc.collect()
                pause(t, recorder)
    t.store.wait()
    if not t.results:
        try:
            _evaluate_all(t)  # resumed after the last step: told before, but not to us
        except Interrupted:
            raise Stopped("stopped in the last evaluation; everything is saved") from None
    return t.results


def tell_compiling(t: Training, began: float) -> None:
    """Say what the first step took, most of which is compiling."""
    if t.device.type == "cuda":
        torch.cuda.synchronize(t.device)
    t.telemetry.message(
        f"compile={t.plan.compile}: the first step took {time.perf_counter() - began:.0f} s; what "
        "was compiled is kept for the next start"
    )


def pause(t: Training, recorder: Recorder) -> None:
    """Between two steps: evaluate, save and stop, whichever is due. All ranks enter here."""
    step = t.state.progress.step
    last = step == t.plan.total_steps
    stops = recorder.stop_requested or (t.stop_at is not None and t.stop_at <= step)
    regroups = recorder.regroup_requested
    evaluates = evaluation_is_due(t)
    # A request to stop has interrupted the evaluation of the step that we went on from.
    saves = stops or regroups or save_is_due(t) or (evaluates and t.saved_step == step)
    if not evaluates and not saves:
        return
    # A save alone need not wait for the GPU: the steps up to it are judged before it is written.
    if evaluates or stops or regroups or last or t.store.unapproved or not t.store.asynchronous:
        recorder.settle()
    if evaluates and not run_evaluation(t):
        stops = saves = True
    if saves:
        save(t, recorder)
    recorder.restart_clock(t.train_loader.wait_seconds)
    if stops and not (last and t.state.progress.evaluated_step == step):
        t.store.wait()
        raise Stopped(f"stopped after step {step}; everything is saved")
    if regroups and not last:
        t.store.wait()
        raise Regroup(f"saved step {step} to take in another node")


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
    t: Training, window: tuple[int, int], batches: Iterator[Batch], recorder: Recorder
) -> None:
    """One optimiser step. All ranks enter here."""
    start, stop = window
    plan, progress, phases = t.plan, t.state.progress, t.phases
    micro = forward_size(plan)
    rounds = len(window_slices(start, stop, micro, dist.rank(), dist.world_size()))
    sums = StepSums.on(t.device)
    leave_out = progress.step + 1 in progress.skipped_steps
    checks = t.guard.nonfinite == "skip"
    if leave_out or checks:
        t.state.statistics.remember()
    # NCCL's operations are recorded by all ranks or by none: in a shorter step, shapes may differ.
    alike = not t.strategy.sends_in_pass or window_size(window) == plan.global_batch
    phases.enter("data", progress.step)
    for i, batch in enumerate(batches):
        micro_step(
            t.state,
            t.strategy,
            t.precision,
            batch,
            sums,
            window=window_size(window),
            last=i == rounds - 1,
            label_smoothing=t.label_smoothing,
            graphs=t.graphs if alike else None,
            enter=lambda phase: phases.enter(phase, progress.step),
        )
        phases.enter("data", progress.step)
    lr = learning_rate(
        t.schedule,
        step=progress.step,
        total_steps=plan.total_steps,
        warmup_steps=plan.warmup_steps,
        peak=plan.peak_lr,
    )
    phases.enter("update", progress.step)
    t.store.before_update()
    norm = update(
        t.state,
        t.strategy,
        lr=lr,
        clip=t.optimizer.clip_grad_norm,
        num_micro_batches=num_micro_batches(start, stop, micro, dist.world_size()),
        leave_out=leave_out,
        check_loss=sums.loss if checks else None,
    )
    record = {"kind": "step", "step": progress.step, "epoch": progress.epoch + 1, "lr": lr}
    progress.samples_seen += window_size(window)
    progress.consumed = stop % len(t.train_loader)
    if progress.consumed == 0:
        progress.epoch += 1
    recorder.submit(
        record | {"samples_seen": progress.samples_seen},
        sums,
        norm,
        window=window_size(window),
        waited=t.train_loader.wait_seconds,
        # What could not be saved is told at the next save: ask for one now.
        stop=t.stop.requested is not None or t.store.failed,
        regroup=t.stop.regroup,
        left_out=leave_out,
    )


def run_evaluation(t: Training) -> bool:
    """Evaluate raw and averaged weights and tell. All ranks enter here.

    Returns:
        False if a request to stop has interrupted it; nothing is told then.
    """
    progress = t.state.progress
    try:
        _evaluate_all(t)
    except Interrupted:
        return False
    for weights, result in t.results.items():
        if not math.isfinite(result.loss):
            what = f"step {progress.step}: the evaluation of the {weights} weights has loss {result.loss}"
            if t.guard.nonfinite == "stop":
                raise UserError(
                    f"{what}, so nothing is saved of it. Lower optimizer.lr or use precision=bf16 "
                    "instead of fp16; guard.nonfinite=skip goes on all the same"
                )
            t.telemetry.message(what)
        t.telemetry.evaluation(
            {"kind": "eval", "step": progress.step, "weights": weights} | asdict(result)
        )
    top1 = main_result(t.results).top1
    if progress.best_top1 is None or top1 > progress.best_top1:
        progress.best_top1, progress.best_step = top1, progress.step
    progress.evaluated_step = progress.step
    t.saved_step = -1  # what may be saved of this step lacks the result
    return True


def save(t: Training, recorder: Recorder) -> None:
    """Save everything, unless this step is saved already. All ranks enter here."""
    state, progress = t.state, t.state.progress
    if t.saved_step == progress.step:
        return
    t.phases.enter("save", progress.step)
    evaluated = progress.evaluated_step == progress.step and t.results
    averages = state.ema.buffers if state.ema is not None else []
    with state.statistics.whole(averages):
        state.statistics.set_batches_tracked(progress.micro_batches)
        tensors, meta = state.to_save()
        t.store.save(
            progress.step,
            tensors,
            t.manifest | meta,
            metric=main_result(t.results).top1 if evaluated else None,
            changing=[*state.model.buffers(), *averages],
        )
    stops = recorder.stop_requested or recorder.regroup_requested
    if t.store.waited_seconds > _LONG_WAIT_SECONDS and not stops:
        t.telemetry.message(
            f"step {progress.step}: training waited {t.store.waited_seconds:.1f} s because the "
            "checkpoint before was still being written; save less often "
            "(checkpoint.every_steps), or choose a faster disk for run.root"
        )
    if recorder.settled:
        t.store.approve(progress.step)
    t.saved_step = progress.step


def main_result(results: dict[str, EvalResult]) -> EvalResult:
    """The figure that stands for the run: of the averaged weights where there are any."""
    return results.get("ema", results["raw"])


def evaluation_is_due(t: Training) -> bool:
    """Whether this step shall be evaluated and is not yet."""
    progress = t.state.progress
    if progress.step in (0, progress.evaluated_step):
        return False
    last = progress.step == t.plan.total_steps
    return last or due(progress, t.evaluation.every_epochs, t.evaluation.every_steps)


def save_is_due(t: Training) -> bool:
    """Whether this step shall be saved, stop or not."""
    progress = t.state.progress
    if progress.step == 0:
        return False
    last = progress.step == t.plan.total_steps
    return last or due(progress, t.checkpoint.every_epochs, t.checkpoint.every_steps)


def due(progress: Progress, every_epochs: int | None, every_steps: int | None) -> bool:
    """Whether something that happens every so many epochs or steps happens after this step."""
    at_epoch_end = progress.consumed == 0
    by_epoch = every_epochs is not None and at_epoch_end and progress.epoch % every_epochs == 0
    return by_epoch or (every_steps is not None and progress.step % every_steps == 0)


def window_size(window: tuple[int, int]) -> int:
    """Samples of an optimiser step."""
    return window[1] - window[0]


def build_recorder(t: Training) -> Recorder:
    """What judges and tells the steps."""
    return Recorder(
        t.device,
        t.telemetry,
        t.store,
        StepGuard(t.guard, t.train_loader.source, t.state.progress.recent_losses),
        StragglerWatch(
            t.guard.straggler,
            ranks_meet_in_forward=t.plan.strategy in ("fsdp", "hsdp")
            or t.strategy.cfg.sync_batchnorm,
        ),
        all_samples_count=t.train_loader.stops_on_error,
        overflow_is_skipped=t.state.scaler.enabled,
    )


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
    def stop() -> bool:
        t.phases.enter("evaluate", t.state.progress.step)
        return t.stop.requested is not None

    try:
        return evaluate(
            t.state.module,
            t.val_loader,
            t.precision,
            batch=t.evaluation.batch,
            device=t.device,
            stop=stop,
        )
    finally:
        t.strategy.after_evaluation()
