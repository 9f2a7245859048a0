"""Settings that do not go together: what is refused, and what is told.

Each function adds to ``problems``, which end the run before it begins, or to ``notes`` of the plan.
:func:`check_new` is for runs that have not begun: what others were made of stays readable.
"""

from __future__ import annotations

from lockstep.config import sizing
from lockstep.config.schema import Config
from lockstep.config.sizing import ModelFacts
from lockstep.errors import UserError

_MODEL_KEYS = {
    "num_classes": "the data set has its own number of classes",
    "in_chans": "images have three channels",
    "img_size": "use model.image_size",
}
"""Arguments of timm's that are not for ``model.kwargs``, and what is instead."""
_OPTIMIZER_KEYS = ("lr", "weight_decay")
_OPTIMIZER_FLAGS = ("capturable", "differentiable")
_MOST_LR = 1e30
"""Scaled by the batch, it is still a float32."""
_TIMEOUTS = (1, 10_000_000)
"""Process groups count milliseconds in 64 bits, stores seconds in 32."""
_MOST_SEED = (1 << 63) - 1
"""numpy takes larger ones for floating point numbers, many of which are the same."""


def check_new(config: Config) -> None:
    """Refuse values that would be ignored, or break the run later. Raises UserError."""
    model, optimizer = config.model, config.optimizer
    problems = [
        f"model.kwargs.{key} = {model.kwargs[key]}: {instead}"
        for key, instead in _MODEL_KEYS.items()
        if key in model.kwargs
    ]
    twice = {
        "drop_path_rate": ("drop_path", model.drop_path),
        "patch_size": ("patch_size", model.patch_size),
    }
    problems += [
        f"model.kwargs.{theirs} = {model.kwargs[theirs]} with model.{ours} = {value}: give one of them"
        for theirs, (ours, value) in twice.items()
        if theirs in model.kwargs and value
    ]
    problems += [
        f"optimizer.kwargs.{key} = {optimizer.kwargs[key]}: use optimizer.{key}"
        for key in _OPTIMIZER_KEYS
        if key in optimizer.kwargs
    ]
    problems += [
        f"optimizer.kwargs.{key} = true: not within a run, which decides it itself: leave it out"
        for key in _OPTIMIZER_FLAGS
        if optimizer.kwargs.get(key)
    ]
    if optimizer.lr > _MOST_LR:
        problems.append(f"optimizer.lr = {optimizer.lr:g}: at most {_MOST_LR:g}")
    if config.seed > _MOST_SEED:
        problems.append(f"seed = {config.seed}: at most {_MOST_SEED}")
    seconds, (least, most) = config.launch.timeout_seconds, _TIMEOUTS
    if not least <= seconds <= most:
        problems.append(f"launch.timeout_seconds = {seconds:g}: at least {least}, at most {most:,}")
    if problems:
        raise UserError("\n".join(problems))


def check_launch(config: Config, model: ModelFacts, problems: list[str], notes: list[str]) -> None:
    """Nodes, and how they meet."""
    launch = config.launch
    if launch.max_nodes > 1 and launch.rendezvous is None and launch.scheduler == "local":
        problems.append(
            f"launch.nodes = {launch.nodes} needs launch.rendezvous=HOST:PORT, an address of one node "
            "that all nodes reach"
        )
    if launch.dry_run and launch.scheduler != "slurm":
        problems.append(
            "launch.dry_run = true prints a script for Slurm: it needs launch=slurm; plan=true prints "
            "the plan"
        )
    if launch.elastic and config.resume == "never":
        problems.append(
            f"resume = never with launch.nodes = {launch.nodes}: a group that forms anew must go "
            "on; leave out resume=never, and choose another run.name to start over"
        )
    if launch.elastic:
        notes.append(
            f"launch.nodes = {launch.nodes}: planned for {launch.max_nodes}; with fewer a step "
            "takes longer, and the global batch stays"
        )
        if model.has_batchnorm and config.batch.micro_batch is None:
            notes.append("set batch.micro: else BatchNorm's batches change with the nodes")
    if rendezvous := launch.rendezvous:
        host, _, port = rendezvous.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            problems.append(f"launch.rendezvous = {rendezvous}: expected HOST:PORT")


def check_strategy(config: Config, strategy: str, problems: list[str], notes: list[str]) -> None:
    """Keys of a strategy, given to another."""
    s = config.strategy
    sharded = strategy in ("fsdp", "hsdp")
    if s.name == "hsdp" and s.shard == "none":
        problems.append("strategy.shard = none with strategy=hsdp: that is strategy=ddp")
    if s.cpu_offload and not sharded:
        problems.append(f"strategy.cpu_offload = true needs strategy=fsdp, not {strategy}")
    if config.optimizer.name.lower() == sizing.ADAMW_8BIT:
        name = f"optimizer.name = {config.optimizer.name}"
        if sharded:
            problems.append(
                f"{name} with strategy={strategy}: its blocks of 256 values would change with the "
                "shards, and the run with them: use strategy=ddp or single, or optimizer=adamw, "
                "whose state is sharded"
            )
        else:
            notes.append(f"{name}: torchao compiles its update, for which the first step waits")
    if s.reduce != "auto" and strategy != "ddp":
        problems.append(f"strategy.reduce = {s.reduce} needs strategy=ddp, not {strategy}")
    if s.name in ("single", "dp", "ddp") and s.shard != "none":
        problems.append(f"strategy.shard = {s.shard} needs strategy=fsdp or hsdp, not {strategy}")
    if s.wrap == "model" and (s.name not in ("fsdp", "hsdp") or s.shard == "full"):
        problems.append(
            "strategy.wrap = model gathers all parameters before forward and keeps them to the end of "
            f"backward: it needs strategy=fsdp (or hsdp) with strategy.shard=grad_op, not strategy={s.name} "
            f"with strategy.shard={s.shard}"
        )
    elif s.wrap == "model" and s.prefetch > 1:
        notes.append(
            "strategy.prefetch has no effect with strategy.wrap=model: nothing is left to gather"
        )
    if s.meta_init and not sharded:
        problems.append(f"strategy.meta_init = true needs strategy=fsdp, not {strategy}")


def check_batchnorm(
    config: Config,
    device: str,
    strategy: str,
    world: int,
    model: ModelFacts,
    problems: list[str],
    notes: list[str],
) -> None:
    """Over which images its statistics are taken."""
    synchronised = config.strategy.sync_batchnorm
    if synchronised and not model.has_batchnorm:
        notes.append("strategy.sync_batchnorm has no effect: the model has no BatchNorm")
    elif synchronised and strategy in ("single", "dp"):
        notes.append(f"strategy.sync_batchnorm has no effect with strategy={strategy}")
    elif synchronised and device == "cpu":
        problems.append(
            "strategy.sync_batchnorm = true needs GPUs, torch has none for the CPU: set it to "
            "false, and batch.micro to get statistics that do not depend on the processes"
        )
    elif model.has_batchnorm and config.batch.micro_batch is None and world > 1:
        notes.append(
            "BatchNorm statistics are per micro-batch: set batch.micro to get the same curve at "
            "another number of processes"
        )


def check_precision(config: Config, device: str, problems: list[str], notes: list[str]) -> None:
    """Formats that a device does not have, or that do not pay."""
    name = config.precision.name
    if name == "tf32" and device != "cuda":
        notes.append(f"precision = tf32 is fp32 on a {device.upper()}: it is a format of GPUs")
    if name == "fp16" and device == "cpu":
        notes.append("precision = fp16 on a CPU is many times slower than fp32 or bf16")
    if name == "fp16" and config.ema.enabled:
        notes.append("fp16: steps skipped by the loss scaler still count as steps")
    if name != "fp8":
        return
    notes.append("fp8 saves memory; on an H200 it was slower than precision=bf16 up to ViT-H")
    if device != "cuda":
        problems.append(
            f"precision = fp8 needs a GPU with 8-bit tensor cores, and device is {device}: use "
            "precision=bf16"
        )
    elif config.compile == "off":
        problems.append(
            "precision = fp8 with compile=off is slower than precision=bf16: scaling and rounding "
            "are kernels of their own then; use compile=auto"
        )


def check_trial(config: Config, model: ModelFacts, fitting: int, problems: list[str]) -> None:
    """``batch.micro=auto``.

    Args:
        fitting: images that a forward pass can take by the estimate.
    """
    if config.compile in ("graphs", "max"):
        problems.append(
            f"batch.micro = auto with compile={config.compile}: recorded passes keep their memory, "
            "which the trial does not see: use compile=default, or a number"
        )
    if config.strategy.name == "dp":
        problems.append("batch.micro = auto does not do strategy=dp: use ddp, or a number")
    if model.has_batchnorm:
        problems.append(
            "batch.micro = auto: BatchNorm's statistics are those of a micro-batch, so another GPU "
            f"would give another run: use a number (by the estimate {fitting} fit)"
        )


def check_data(config: Config, num_classes: int, device: str, problems: list[str]) -> None:
    """Where images come from, and what is done to them."""
    if num_classes < 2:
        problems.append(f"data.root = {config.data.root} has {num_classes} class: at least 2")
    for name, (low, high) in {"scale": config.augment.scale, "ratio": config.augment.ratio}.items():
        if low > high or low <= 0:
            problems.append(f"augment.{name} = [{low}, {high}]: expected 0 < low <= high")
    if config.data.cache == "gpu" and config.augment.policy != "none":
        problems.append(
            f"data.cache = gpu does not do augment.policy = {config.augment.policy}: use "
            "data.cache=ram or augment.policy=none"
        )
    if config.data.cache == "gpu" and device != "cuda":
        problems.append(
            f"data.cache = gpu needs an NVIDIA GPU, and device is {device}: use data.cache=ram"
        )
    if config.data.decode in ("gpu", "hybrid"):
        what = f"data.decode = {config.data.decode}"
        if config.augment.policy != "none":
            problems.append(
                f"{what} does not do augment.policy = {config.augment.policy}: use data.decode=cpu "
                "or augment.policy=none"
            )
        if config.data.cache in ("ram", "gpu"):
            problems.append(
                f"{what}: data.cache = {config.data.cache} holds decoded images; use one"
            )
        if device != "cuda":
            problems.append(
                f"{what} needs an NVIDIA GPU, and device is {device}: use data.decode=auto"
            )
    if config.data.gpu_share is not None and config.data.decode != "hybrid":
        problems.append(
            f"data.gpu_share = {config.data.gpu_share} is for data.decode=hybrid, and it is "
            f"{config.data.decode}"
        )


def check_schedule(config: Config, problems: list[str]) -> None:
    """Milestones of the learning rate."""
    milestones = list(config.schedule.milestones)
    if milestones != sorted(milestones):
        problems.append(f"schedule.milestones = {milestones}: not ascending")
