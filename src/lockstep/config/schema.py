"""Every knob of a run, typed and documented.

Values live in ``conf/*.yaml`` only: no field has a default here, so a key that is missing from the
YAML is an error and not a hidden choice. After binding, the configuration is frozen.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

COMMUNICATION = ("NCCL_", "TORCH_NCCL_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "TORCH_CPP_LOG_LEVEL",
                 "GLOO_", "UCX_", "FI_", "CUDA_DEVICE_MAX_CONNECTIONS")  # fmt: skip
"""What ``nccl.env`` may set: beginnings of names."""

SBATCH = ("account", "begin", "clusters", "comment", "constraint", "core_spec", "cores_per_socket",
          "cpus_per_gpu", "cpus_per_task", "deadline", "dependency", "exclude", "exclusive", "gpus",
          "gpus_per_node", "gres", "gres_flags", "hint", "licenses", "mail_type", "mail_user", "mem",
          "mem_bind", "mem_per_cpu", "mem_per_gpu", "network", "nice", "no_requeue", "nodelist",
          "open_mode", "partition", "power", "priority", "qos", "requeue", "reservation", "signal",
          "sockets_per_node", "switches", "threads_per_core", "time", "time_min", "tmp",
          "wckey")  # fmt: skip
"""What ``launch.slurm`` may set: options of sbatch that neither run nor write anything."""

SBATCH_VALUE = re.compile(r"[\w.,:;@%+=*&|!()\[\]/-]*")

PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of all sections: frozen, and a key that nobody reads is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=()
    )


class Run(Section):
    """Where the run lives."""

    name: str | None = Field(description="folder name below root; null derives it from the config")
    root: str = Field(description="folder that holds all runs")


class Batch(Section):
    """How many samples make one optimiser step."""

    global_batch: PositiveInt = Field(
        alias="global", description="samples per optimiser step over all processes: the invariant"
    )
    micro_batch: PositiveInt | Literal["auto"] | None = Field(
        alias="micro",
        description="samples per forward pass of one process; null: the process's whole slice; "
        "auto: as many as the device holds, tried at the start and kept by a resume",
    )


class Model(Section):
    """Which network; ``name`` is any timm model."""

    name: str = Field(description="timm model name")
    pretrained: bool = Field(description="start from timm's published weights (needs network)")
    image_size: PositiveInt | None = Field(description="pixels; null follows the data set")
    patch_size: PositiveInt | Literal["auto"] | None = Field(
        description="ViT patch side in pixels; auto: 16, or a quarter of an image below 64 px; "
        "null: as the model has it"
    )
    drop_path: Rate = Field(description="stochastic depth rate of the last block")
    activation_checkpointing: bool = Field(description="recompute blocks in backward")
    draw: Literal["model", "parameter"] = Field(
        description="first weights. model: as torch draws them, one after the other, whole in host "
        "memory; parameter: each from its own stream, in parallel, on its device and shard alone"
    )
    kwargs: dict[str, Any] = Field(description="further arguments of timm.create_model")


class Strategy(Section):
    """How the processes share the work."""

    name: Literal["single", "dp", "ddp", "fsdp", "hsdp", "auto"] = Field(
        description="auto: single for one process, else ddp; fsdp or hsdp where the model does not "
        "fit a GPU (the plan says why)"
    )
    shard: Literal["full", "grad_op", "none"] = Field(
        description="fsdp: what is sharded. full: parameters, gradients, optimiser state; "
        "grad_op: parameters stay whole from forward to backward; none: nothing"
    )
    wrap: Literal["block", "model"] = Field(
        description="fsdp: what is gathered and reduced as one. block: each block, while others are "
        "computed; model: all before the pass and all after it, which leaves a model of up to 16 "
        "blocks whole for the compiler; for models that are small beside the GPU, with shard=grad_op"
    )
    shard_processes: PositiveInt | None = Field(
        description="hsdp: processes that share one copy of the model; null: those of one node, "
        "or half of them on a single node"
    )
    cpu_offload: bool = Field(
        description="fsdp: keep parameters and optimiser state in host memory"
    )
    prefetch: NonNegativeInt = Field(description="fsdp: blocks gathered ahead of the running one")
    sync_batchnorm: bool = Field(description="batch statistics over all processes of a micro-batch")
    reduce: Literal["auto", "backward", "after"] = Field(
        description="ddp: when gradients are averaged. backward: while the backward pass runs, "
        "bucket by bucket; after: all at its end, which leaves the pass whole for the compiler and "
        "can be recorded; auto: after on GPUs with compile=graphs, with deterministic=true, and where "
        "steps are compiled and NVLink joins all GPUs of a single node; else backward"
    )
    static_graph: bool = Field(
        description="ddp, reduce=backward: the graph is the same in every step"
    )
    bucket_mb: PositiveFloat = Field(
        description="ddp, reduce=backward: gradient bucket size in MiB"
    )
    meta_init: bool = Field(description="fsdp: only rank 0 holds the whole model while building")


class Precision(Section):
    """Number format of the arithmetic. Weights and optimiser state stay fp32."""

    name: Literal["fp32", "tf32", "bf16", "fp16", "fp8"] = Field(
        description="fp8: bf16, and wide Linear layers of the blocks in 8 bits (torchao)"
    )
    residual: Literal["fp32", "low"] = Field(
        description="what a block hands to the next, where arithmetic is of 16 bits; low: 16 bits, "
        "too; fp32: as autocast has it"
    )
    initial_scale: PositiveFloat = Field(description="fp16: first loss scale")
    growth_interval: PositiveInt = Field(description="fp16: good steps before the scale doubles")


class Nccl(Section):
    """Environment preset of NCCL and torch.distributed."""

    name: str
    env: dict[str, str | int] = Field(description="variables set before the process group starts")

    @field_validator("env")
    @classmethod
    def _communication_alone(cls, value: dict[str, str | int]) -> dict[str, str | int]:
        # A configuration may come from a stranger, and LD_PRELOAD or a plugin's path runs code.
        for name, text in value.items():
            if not name.startswith(COMMUNICATION) or "/" in str(text):
                raise ValueError(
                    f"only variables {', '.join(f'{c}*' for c in COMMUNICATION)} without paths; "
                    f"export {name} yourself"
                )
        return value


class Data(Section):
    """Which images."""

    name: Literal["digits", "cifar10", "imagenette", "imagenet", "folder"]
    root: str = Field(description="folder holding train/ and val/, one folder a class below each")
    source: Literal["folder", "packed"] = Field(
        description="how images are stored; packed: by scripts/prepare_data.py pack"
    )
    decode: Literal["cpu", "gpu", "hybrid", "auto"] = Field(
        description="where images are decoded; hybrid: data.gpu_share of the JPEGs by the GPU; "
        "auto: measured at the start. Where colours are stored at half the size, pixels differ"
    )
    gpu_share: Annotated[float, Field(gt=0, le=1)] | None = Field(
        description="decode=hybrid: share of the JPEGs that the GPU decodes; null: measured at the "
        "start, and kept by a resume"
    )
    cache: Literal["auto", "off", "ram", "gpu"] = Field(
        description="keep decoded images: ram: in each process, a split that fits into its share of "
        "half the free memory; gpu: all on each device, where they are cropped, too; auto: in each "
        "process, a split of up to 256 MiB"
    )
    image_size: PositiveInt = Field(description="side of the training crop, pixels")
    num_classes: PositiveInt | None = Field(description="null: counted in the folder")
    num_train: PositiveInt | None = Field(description="null: counted in the folder")
    num_val: PositiveInt | None = Field(description="null: counted in the folder")
    mean: tuple[float, float, float] = Field(description="per channel, of pixels in 0..1")
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = Field(description="per channel")
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        description="evaluation: centre crop side / short side after resizing"
    )
    interpolation: Literal["bilinear", "bicubic"]
    on_error: Literal["stop", "skip"] = Field(
        description="an image that cannot be read: stop the run, or replace it and count it"
    )
    exif_rotate: bool = Field(description="apply the EXIF orientation")
    workers: PositiveInt | None = Field(
        description="decoders per process; null: cores / processes of this machine"
    )
    worker_kind: Literal["auto", "thread", "process"] = Field(
        description="what they are; auto: processes where a GPU trains, or they would hold up the "
        "loop that launches its kernels"
    )
    prefetch: PositiveInt = Field(description="micro-batches prepared ahead")
    shuffle_block: PositiveInt = Field(
        description="1: any image may follow any other; more: so many neighbours are read together "
        "and shuffled with those of 255 other places, for slow disks and packed images"
    )


class Augment(Section):
    """What training does to an image; drawn from (seed, epoch, sample) alone."""

    crop: Literal["random_resized", "pad", "resize", "none"] = Field(
        description="random_resized: Inception crop; pad: shift by up to an eighth of the side; "
        "resize: whole image; none: the evaluation crop"
    )
    scale: tuple[Fraction, Fraction] = Field(description="random_resized: area range")
    ratio: tuple[PositiveFloat, PositiveFloat] = Field(description="random_resized: aspect range")
    hflip: Fraction = Field(description="probability of a horizontal flip")
    policy: Literal["none", "randaugment", "trivialaugment"]
    num_ops: PositiveInt = Field(description="randaugment: operations per image")
    magnitude: Annotated[int, Field(ge=0, le=30)] = Field(description="randaugment: 0..30")
    erasing: Fraction = Field(description="probability of erasing a rectangle")
    mixup: NonNegativeFloat = Field(description="Beta parameter; 0 is off")
    cutmix: NonNegativeFloat = Field(description="Beta parameter; 0 is off")
    label_smoothing: Rate


class Optimizer(Section):
    """Parameter update."""

    name: str = Field(description="sgd, adamw, or any optimiser of torch.optim or timm")
    lr: PositiveFloat = Field(description="peak learning rate at base_batch")
    base_batch: PositiveInt | None = Field(
        description="lr is multiplied by batch.global / base_batch; null: lr is used as it is"
    )
    weight_decay: NonNegativeFloat
    decay_bias_and_norm: bool = Field(description="weight decay on biases and norms, too")
    clip_grad_norm: PositiveFloat | None = Field(description="largest global gradient norm")
    kwargs: dict[str, Any] = Field(description="further arguments of the optimiser")


class Schedule(Section):
    """Learning rate as a function of the optimiser step."""

    name: Literal["cosine", "step", "constant"]
    warmup_epochs: NonNegativeFloat = Field(description="linear warm-up from warmup_start * lr")
    warmup_start: Fraction
    final: Fraction = Field(description="cosine: last learning rate / peak")
    milestones: tuple[Fraction, ...] = Field(description="step: fractions of the run")
    factor: Fraction = Field(description="step: multiplier at each milestone")


class Ema(Section):
    """Moving average of the weights, evaluated beside the raw ones."""

    enabled: bool = Field(description="keep and evaluate a moving average of the weights, too")
    decay: Annotated[float, Field(gt=0, lt=1)]
    warmup: bool = Field(description="decay = min(decay, (1 + step) / (10 + step))")


class Evaluate(Section):
    """When to evaluate; the last step always is."""

    every_epochs: PositiveInt | None
    every_steps: PositiveInt | None
    batch: PositiveInt = Field(description="samples per forward pass of one process")


class Checkpoint(Section):
    """When to save and what to keep; the last step is always saved."""

    every_epochs: PositiveInt | None
    every_steps: PositiveInt | None
    asynchronous: bool | Literal["auto"] = Field(
        alias="async",
        description="write behind the training, in a process of its own beside each rank; false: "
        "training waits; auto: true on GPUs",
    )
    keep_last: PositiveInt
    keep_best: bool = Field(description="also keep the checkpoint of the best top-1")


class Guard(Section):
    """What to do when a step goes wrong."""

    nonfinite: Literal["stop", "skip", "rollback"] = Field(
        description="loss or gradient NaN or infinite. stop: end the run; skip: leave the update "
        "out (waits for the device in every step); rollback: go back to the last checkpoint and "
        "leave the update out when it comes again"
    )
    spike: Annotated[float, Field(gt=1)] | None = Field(
        description="roll back when the loss exceeds this many times the median of the last 50 "
        "steps; null: never"
    )
    max_incidents: PositiveInt = Field(
        description="rollbacks, or skipped steps in a row, before the run stops"
    )
    straggler: Annotated[float, Field(gt=1)] | None = Field(
        description="name a process that takes this many times the median's time; null: never"
    )


class Telemetry(Section):
    """Who is told. metrics.jsonl is always written: it is the source of truth."""

    console: bool
    console_seconds: PositiveFloat = Field(description="plain lines: seconds between two of them")
    wandb: bool
    wandb_project: str
    wandb_mode: Literal["auto", "online", "offline"] = Field(
        description="auto: online when a key is configured, else offline"
    )


class Sweep(Section):
    """How the jobs of ``train.py -m`` share this machine, and which of them are worth going on."""

    jobs: PositiveInt | Literal["auto"] = Field(
        description="at the same time; auto: as many as sweep.gpus_per_job allows, or one"
    )
    gpus_per_job: PositiveInt | None = Field(
        description="GPUs that each job has for itself; null: every job sees all of them"
    )
    metric: Literal["top1", "top5", "loss"] = Field(
        description="of the last evaluation: sorts the table, and is what Optuna optimises"
    )
    prune: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        description="stop a job whose best metric lies below this quantile of what the others had "
        "reached at the same step; 0.5: the median; null: never"
    )
    prune_from: Fraction = Field(description="fraction of its steps before which no job is stopped")
    prune_after: PositiveInt = Field(description="others that must have come as far")


class Launch(Section):
    """Processes and nodes."""

    scheduler: Literal["local", "slurm"] = Field(
        description="slurm: hand a batch script to sbatch, with one of our agents on each node"
    )
    dry_run: bool = Field(description="slurm: print the script, submit nothing")
    slurm: dict[str, str | int | bool] = Field(
        description="options of sbatch by their long names, with _ for -: "
        "launch.slurm.gpus_per_node=8; true: an option without a value"
    )

    processes: PositiveInt | Literal["auto"] = Field(
        description="per node; auto: the visible GPUs, or 1 on CPU"
    )
    nodes: PositiveInt | str = Field(
        description="a number, or MIN:MAX: goes on with what remains of the nodes, takes in more"
    )
    rendezvous: str | None = Field(description="HOST:PORT that all nodes reach; needed for nodes>1")
    gather_seconds: PositiveFloat = Field(
        description="nodes=MIN:MAX: how long a group of MIN waits for further nodes"
    )
    max_restarts: NonNegativeInt | None = Field(
        description="times that failed processes are started again; null: never for a fixed number "
        "of nodes, always for MIN:MAX. Three failures without a new checkpoint end the run anyway"
    )
    timeout_seconds: PositiveFloat = Field(
        description="a process that stands still for longer, while others wait, hangs"
    )
    grace_seconds: PositiveFloat = Field(description="time to save after a request to stop")

    @field_validator("slurm")
    @classmethod
    def _resources_alone(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        # A configuration may come from a stranger, and --wrap or a line break runs code.
        for name, text in value.items():
            if name not in SBATCH:
                raise ValueError(
                    f"{name}: only {', '.join(SBATCH)}; launch.dry_run=true prints a script to "
                    "which you can add others"
                )
            if not SBATCH_VALUE.fullmatch(str(text)):
                raise ValueError(f"{name} = {text!r}: no spaces, quotes or line breaks")
        return value

    @field_validator("nodes")
    @classmethod
    def _range_of_nodes(cls, value: int | str) -> int | str:
        if isinstance(value, int):
            return value
        least, _, most = value.partition(":")
        if least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most):
            return value
        raise ValueError("must be a number of nodes, or MIN:MAX as 1:4")

    @property
    def min_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.partition(":")[0])

    @property
    def max_nodes(self) -> int:
        return self.nodes if isinstance(self.nodes, int) else int(self.nodes.partition(":")[2])

    @property
    def elastic(self) -> bool:
        """Whether the number of nodes may change."""
        return isinstance(self.nodes, str)


class Config(Section):
    """A whole run. Only the worker and the plan see it whole."""

    device: Literal["auto", "cuda", "cpu"] = Field(
        description="cuda, cpu, or auto: cuda where a GPU is visible"
    )
    seed: NonNegativeInt = Field(
        description="of first weights, order, augmentation and stochastic depth"
    )
    epochs: PositiveInt = Field(description="passes over the training images")
    steps: PositiveInt | None = Field(description="total optimiser steps, instead of epochs")
    stop_at: PositiveInt | None = Field(description="save and stop after this step, to be resumed")
    plan: bool = Field(description="print the plan and exit")
    resume: str = Field(
        description="auto: go on with what the run's folder holds; never: refuse a folder that "
        "holds a run; or the path of a run or checkpoint folder to go on from"
    )
    deterministic: bool = Field(
        description="bit for bit the same on the same hardware, for the price of speed; without "
        "it, GPU sums differ in their last bits from run to run"
    )
    compile: Literal["auto", "off", "default", "graphs", "max"] = Field(
        description="off; default: torch.compile; graphs: and each forward and backward pass "
        "recorded as one CUDA graph (not with dp or hsdp; the plan says what else is against it); "
        "max: and kernels chosen by trial, which takes minutes and seldom pays; "
        "auto: graphs or default on a GPU, for runs of 1,000 steps and more"
    )
    run: Run
    batch: Batch
    model: Model
    strategy: Strategy
    precision: Precision
    nccl: Nccl
    data: Data
    augment: Augment
    optimizer: Optimizer
    schedule: Schedule
    ema: Ema
    evaluate: Evaluate
    checkpoint: Checkpoint
    guard: Guard
    telemetry: Telemetry
    launch: Launch
    sweep: Sweep
