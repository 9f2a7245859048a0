"""The composition root: the only place that sees the whole configuration and builds every part.

Level 6. One process of a run; the launcher has described its place in the environment.
"""

from __future__ import annotations

import gc
import math
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from pydantic import BaseModel, ValidationError

from lockstep import __version__, dist
from lockstep.checkpoint.export import git_revision
from lockstep.checkpoint.manifest import check_law
from lockstep.checkpoint.store import Found, Store, find_checkpoint
from lockstep.config.bind import fingerprint, law
from lockstep.config.plan import Plan, even_micro
from lockstep.config.schema import Config, Fraction, PositiveInt
from lockstep.data import open_split
from lockstep.data.loader import Loader
from lockstep.data.nvjpeg import share_for_gpu
from lockstep.data.source import Source
from lockstep.engine.finish import finish
from lockstep.engine.graphs import PassGraphs
from lockstep.engine.guard import RollBack
from lockstep.engine.loop import StopRequest, Training, fit
from lockstep.engine.micro import fewest_rounds, holds
from lockstep.engine.state import Progress, TrainState
from lockstep.errors import Stopped, UserError
from lockstep.models.batchnorm import RunningStatistics
from lockstep.models.build import build, no_decay_names
from lockstep.models.fast import compile_in_place
from lockstep.optim.build import build_optimizer
from lockstep.optim.ema import WeightAverage
from lockstep.strategy import Strategy, build_strategy
from lockstep.strategy.precision import (
    LossScaler,
    lower_residuals,
    set_matmul_precision,
    use_fp8,
)
from lockstep.telemetry import Telemetry, open_telemetry
from lockstep.telemetry.phases import Phases

_MEASURE_SECONDS = 1.0
"""For each decoder, where ``data.decode`` leaves the choice to a measurement."""


def run(config: Config, plan: Plan, run_dir: Path, stop: StopRequest) -> dict[str, Any]:
    """Train as one process of the run.

    Returns:
        Plain summary for people and for ``DONE``: run, step, top1, top5, loss, count, best.

    Raises:
        UserError: on every rank alike. Stopped: asked to stop, saved.
    """
    device = dist.init(
        plan.device,
        # The launcher looks for who hangs, and can tell; this is for when it does not.
        2 * config.launch.timeout_seconds,
        group_of_one=plan.strategy in ("fsdp", "hsdp"),
    )
    # Strategy and trials follow from a machine's memory and links, and nodes may differ.
    plan = replace(dist.broadcast_object(plan), threads=plan.threads)
    try:
        summary = _train(config, plan, run_dir, device, stop)
    except (UserError, Stopped):
        dist.shutdown()
        raise
    # After a crash the group is left to the end of the process: peers may be gone, and leaving
    # could wait for them.
    dist.shutdown()
    return summary


def _train(
    config: Config, plan: Plan, run_dir: Path, device: torch.device, stop: StopRequest
) -> dict[str, Any]:
    """Compose and train; anew after each rollback, which goes on like any other resume."""
    skipped: list[int] = []
    reasons: list[str] = []
    while True:
        training = compose(config, plan, run_dir, device, stop, skipped=skipped, notes=reasons[-1:])
        try:
            fit(training)
            card = {
                "fingerprint": fingerprint(config),
                "recipe": config.model_dump(by_alias=True, mode="json"),
            }
            return finish(training, run_dir, card)
        except RollBack as exc:
            training.store.wait()
            training.store.forget(min(exc.steps))
            skipped = sorted({*training.state.progress.skipped_steps, *exc.steps})
            reasons.append(f"{exc}: rolling back, its update will be left out")
            if len(reasons) > config.guard.max_incidents:
                raise UserError(
                    f"{exc}; that would be more than guard.max_incidents = "
                    f"{config.guard.max_incidents} rollbacks of one start: lower optimizer.lr or "
                    "look at these samples"
                ) from exc
        except UserError:
            with suppress(UserError):  # the first is the one to be told
                training.store.wait()
            raise
        finally:
            if training.graphs is not None:
                training.graphs.release()
            training.phases.close()
            training.train_loader.close()
            training.val_loader.close()
            training.store.close()
            training.telemetry.close(None)
        del training
        release_memory()  # the new one would not fit beside it


def compose(
    config: Config,
    plan: Plan,
    run_dir: Path,
    device: torch.device,
    stop: StopRequest,
    *,
    skipped: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> Training:
    """Build every part, restore the newest checkpoint, open telemetry. All ranks enter here.

    Args:
        skipped: steps whose updates are left out.
        notes: what the user should know first.
    """
    phases = Phases(run_dir / "logs", dist.rank(), config.launch.timeout_seconds)
    phases.enter("start", 0)
    set_matmul_precision(config.precision)
    if config.deterministic:
        make_deterministic()
    train_loader, val_loader = dist.together(lambda: build_loaders(config, plan, device))
    refuse_different_data(config, train_loader, val_loader)

    store = Store(
        run_dir,
        keep_last=config.checkpoint.keep_last,
        keep_best=config.checkpoint.keep_best,
        asynchronous=plan.device == "cuda"
        if config.checkpoint.asynchronous == "auto"
        else config.checkpoint.asynchronous,
    )
    found = where_to_begin(config, store)
    notes = [*notes, *share_decoding(config, found, train_loader, val_loader)]

    plan, told = settle_micro_batch(config, plan, device, found)
    state, strategy = build_state(config, plan, device)
    notes = [*notes, *told]

    manifest = {
        "law": law(config),
        "data": {"train": train_loader.source.digest, "val": val_loader.source.digest},
        "classes": train_loader.source.classes,
        "git": dist.on_main(lambda: git_revision(Path.cwd())),
        "versions": versions(),
        "world_size": dist.world_size(),
        "micro_batch": plan.micro_batch,
        "gpu_share": train_loader.gpu_share,
    }
    if found is not None:
        notes += restore(state, store, found, manifest)
    else:
        state.statistics.split(state.statistics.buffers)
        if state.ema is not None:
            state.statistics.split(state.ema.buffers)
    state.progress.skipped_steps = sorted({*state.progress.skipped_steps, *skipped})
    telemetry = dist.on_main_only(
        lambda: open_telemetry(
            config.telemetry,
            run_dir=run_dir,
            config=config.model_dump(by_alias=True, mode="json"),
            run_name=run_dir.name,
            total_steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            resume_step=state.progress.step,
        ),
        otherwise=Telemetry([]),
    )
    for note in notes:
        telemetry.message(note)
    return Training(
        plan=plan,
        optimizer=config.optimizer,
        schedule=config.schedule,
        precision=config.precision,
        evaluation=config.evaluate,
        checkpoint=config.checkpoint,
        guard=config.guard,
        label_smoothing=config.augment.label_smoothing,
        stop_at=config.stop_at,
        device=device,
        strategy=strategy,
        state=state,
        graphs=PassGraphs(list(state.model.parameters())) if plan.records else None,
        train_loader=train_loader,
        val_loader=val_loader,
        store=store,
        telemetry=telemetry,
        phases=phases,
        stop=stop,
        manifest=manifest,
        saved_step=state.progress.step if found is not None else -1,
    )


def build_state(
    config: Config, plan: Plan, device: torch.device, *, compiled: bool = True
) -> tuple[TrainState, Strategy]:
    """Model, strategy and optimiser at the start of a run. All ranks enter here.

    Args:
        compiled: as the plan says; False: not.
    """
    strategy = build_strategy(
        plan.strategy,
        # strategy=auto is decided by the plan.
        config.strategy.model_copy(
            update={"shard": plan.shard, "cpu_offload": plan.cpu_offload, "reduce": plan.reduce}
        ),
        config.precision,
        shard_processes=plan.shard_processes,
        accumulation=plan.accumulation,
        recorded=plan.records,
    )
    # With meta_init, only rank 0 holds weights; prepare() hands out the shards.
    drawn_whole = config.model.draw == "model" or config.model.pretrained
    hands_out = config.strategy.meta_init and strategy.materialises_meta and drawn_whole
    meta = hands_out and not dist.is_main()
    model = dist.together(
        lambda: build(
            config.model,
            image_size=plan.image_size,
            num_classes=plan.data.num_classes,
            seed=config.seed,
            meta=meta,
        )
    )
    if config.precision.name == "fp8":
        dist.together(lambda: use_fp8(model, device))
    if config.precision.residual == "low":
        lower_residuals(model, config.precision)
    if compiled and plan.compile != "off":
        splits = plan.strategy == "dp" or (plan.strategy == "ddp" and plan.reduce == "backward")
        compile_in_place(
            model,
            plan.compile,
            by_block=strategy.materialises_meta and config.strategy.wrap == "block",
            ours=device.type == "cuda" and not splits,
            norms=plan.records and not config.strategy.sync_batchnorm,
        )
    if device.type == "cuda" and not strategy.materialises_meta:
        # FSDP shards contiguous parameters alone; its convolutions follow the images' layout.
        model.to(memory_format=torch.channels_last)
    module = strategy.prepare(model, device)
    statistics = RunningStatistics(model)
    optimizer = dist.together(
        lambda: build_optimizer(
            model,
            config.optimizer,
            no_decay=no_decay_names(model),
            fused=device.type == "cuda" or plan.cpu_offload,
        )
    )
    state = TrainState(
        model=model,
        module=module,
        optimizer=optimizer,
        scaler=LossScaler(config.precision),
        statistics=statistics,
        ema=WeightAverage(model, statistics.buffers, config.ema) if config.ema.enabled else None,
        progress=Progress(),
    )
    return state, strategy


def settle_micro_batch(
    config: Config, plan: Plan, device: torch.device, found: Found | None
) -> tuple[Plan, list[str]]:
    """The plan with ``batch.micro=auto`` replaced by a number, and what to tell. All ranks enter here.

    Args:
        found: what will be resumed; its micro-batch stays.

    Raises:
        UserError: not even one image fits.
    """
    if not plan.tries_micro:
        return plan, []
    whole = math.ceil(plan.global_batch / plan.world_size)
    if found is not None:
        kept = even_micro(whole, math.ceil(whole / checked(found).micro_batch))
        return plan.with_micro(kept), [f"batch.micro=auto: {kept}, kept from {found.path.name}"]
    # DDP reduces gradients in backward, where a rank that has run out would be waited for.
    alone = replace(plan, strategy="single") if plan.strategy == "ddp" else plan
    parts: list[tuple[TrainState, Strategy]] = []
    tries: list[int] = []

    def fits(micro: int) -> bool:
        tries.append(micro)
        if not parts:
            parts.append(build_state(config, alone, device, compiled=False))
            parts[0][0].tensors()  # gives the optimiser its state
        held = holds(
            *parts[0],
            config.precision,
            device,
            micro=micro,
            image_size=plan.image_size,
            num_classes=plan.data.num_classes,
        )
        if dist.any_rank(not held):
            parts.clear()
        release_memory()
        return bool(parts)

    rounds = fewest_rounds(fits, whole, plan.accumulation)
    parts.clear()
    release_memory()
    if rounds is None:
        raise UserError(
            f"batch.micro = auto: not even one image of {plan.image_size} px fits {device}: use "
            "model.activation_checkpointing=true, strategy=fsdp, or a smaller model"
        )
    micro = even_micro(whole, rounds)
    times = "once" if rounds == 1 else f"{rounds} times"
    told = (
        f"batch.micro=auto: {micro} images a forward pass, {times} a step, is the most that fits "
        f"(tried {', '.join(map(str, tries))}); a resume keeps it"
    )
    return plan.with_micro(micro), [told]


def release_memory() -> None:
    """Give back what nobody holds; FSDP's hooks make circles."""
    gc.collect()
    torch.cuda.empty_cache()


def make_deterministic() -> None:
    """Choose algorithms whose sums have a fixed order, where torch has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # has no deterministic backward pass


def build_loaders(config: Config, plan: Plan, device: torch.device) -> tuple[Loader, Loader]:
    """Training and validation images."""
    train = open_split(config.data, "train")
    val = open_split(config.data, "val", classes=train.classes)
    if len(train.classes) != plan.data.num_classes:
        raise UserError(
            f"data.root = {config.data.root}: {len(train.classes)} class folders, but "
            f"data.num_classes = {plan.data.num_classes}"
        )

    def loader(source: Source, training: bool) -> Loader:
        return Loader(
            source,
            config.data,
            config.augment if training else None,
            image_size=plan.image_size,
            seed=config.seed,
            device=device,
            threads=plan.threads,
        )

    return loader(train, True), loader(val, False)


def share_decoding(config: Config, found: Found | None, *loaders: Loader) -> list[str]:
    """Set which share of the JPEGs the GPU decodes; returns what to tell. All ranks enter here.

    Args:
        found: what will be resumed; the share stays.

    Raises:
        UserError: the GPU shall decode and cannot.
    """
    cfg, train = config.data, loaders[0]
    before = checked(found).gpu_share if found is not None else None
    share, notes = {"cpu": 0.0, "gpu": 1.0}.get(cfg.decode, cfg.gpu_share), list[str]()
    cpu_alone = cfg.cache in ("ram", "gpu") or config.augment.policy != "none"
    if share != 0 and not cpu_alone:
        told = dist.gather_objects([loader.prepare_gpu() for loader in loaders])
        reasons = [reason for rank in told for reason in rank if reason is not None]
        if reasons and cfg.decode != "auto":
            raise UserError(f"data.decode = {cfg.decode}: {reasons[0]}: use data.decode=cpu")
        cpu_alone = bool(reasons)
    if cpu_alone:
        share = 0.0
    elif share is None and before is not None:
        share = before
    elif share is None:
        cpu, gpu = dist.gather_objects(dist.together(lambda: train.rates(_MEASURE_SECONDS)))[0]
        share = share_for_gpu(cpu, gpu)
        notes.append(
            f"decoding: {cpu:,.0f} images/s by the CPU, {gpu:,.0f} by the GPU alone: the GPU takes "
            f"{share:.0%} of the JPEGs (data.decode={cfg.decode})"
        )
    if before is not None and before != share:
        notes.append(
            f"the GPU decoded {before:.0%} of the JPEGs before and decodes {share:.0%} now: where "
            "colours are stored at half the size, pixels differ a little"
        )
    for loader in loaders:
        loader.gpu_share = share
    return notes


def refuse_different_data(config: Config, *loaders: Loader) -> None:
    """All ranks must see the same images: nodes may have copies of their own. All enter here."""
    seen = dist.gather_objects([loader.source.digest for loader in loaders])
    if others := [rank for rank, digests in enumerate(seen) if digests != seen[0]]:
        raise UserError(
            f"data.root = {config.data.root}: rank {others[0]} sees other images than rank 0: give "
            "every node the same copy"
        )


def where_to_begin(config: Config, store: Store) -> Found | None:
    """What to go on from: this run's own newest checkpoint, else the one that ``resume`` names."""
    # With resume=never, too: the launcher has seen an empty folder, so what is there is of this
    # very start, before a restart or a rollback.
    found = store.find()
    if found is None and config.resume not in ("auto", "never"):
        try:
            found = find_checkpoint(Path(config.resume))
        except UserError as error:
            raise UserError(f"resume = {config.resume}: {error}") from error
    return found


class _Saved(BaseModel):
    """What the plain values of a checkpoint must be, whoever wrote it."""

    law: dict[str, Any]
    data: dict[str, str]
    progress: Progress
    scaler: dict[str, float]
    optimizer: dict[str, Any]
    world_size: PositiveInt
    micro_batch: PositiveInt
    gpu_share: Fraction = 0.0


def checked(found: Found) -> _Saved:
    """A checkpoint's plain values. Raises UserError."""
    try:
        return _Saved.model_validate(found.meta)
    except ValidationError as exc:
        wrong = exc.errors(include_url=False)[0]
        raise UserError(
            f"{found.path}: not a checkpoint of a run (its manifest's "
            f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}): resume from another, or start "
            "with resume=never"
        ) from exc


def restore(state: TrainState, store: Store, found: Found, manifest: dict[str, Any]) -> list[str]:
    """Load a checkpoint into ``state``; returns what the user should know of it."""
    checked(found)
    check_law(found.meta["law"], manifest["law"])
    for split, digest in manifest["data"].items():
        if found.meta["data"].get(split) != digest:
            raise UserError(
                f"the {split} images changed since {found.path.name} was saved (digest "
                f"{found.meta['data'].get(split)}, now {digest}): restore the data (dvc checkout), or "
                "train anew under another run.name"
            )
    tensors = state.tensors()
    meta = store.load(found, tensors)
    state.adopt(tensors, meta)
    notes = [*found.notes, f"resumed from {found.path.name}"]
    before = (meta["world_size"], meta["micro_batch"])
    now = (manifest["world_size"], manifest["micro_batch"])
    if before[0] != now[0]:
        pace = before[0] / now[0]
        notes.append(
            f"{before[0]} process(es) became {now[0]}: the run is the same, a step takes about "
            + (f"{pace:.1f} times as long" if pace > 1 else f"{pace:.2f} of the time")
        )
    if state.statistics.buffers and before[1] != now[1]:
        notes.append(
            f"micro-batch {before[1]} became {now[1]} and the model has BatchNorm: the curve may "
            f"change; batch.micro={before[1]} keeps it"
        )
    return notes


def versions() -> dict[str, str]:
    """What the run was computed with."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "gpu": gpu,
    }
