"""How much memory a device needs, what would fit, and the strategy that ``auto`` chooses.

Level 0: pure arithmetic on facts; imports no torch. It is an estimate: what the run keeps from step
to step is exact, activations are those of timm's code in eager mode, and what the allocator wastes
is a margin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from lockstep.config.schema import Config

GIB = 2**30
ADAMW_8BIT = "adamw8bit"
"""AdamW with moments of 8 bits: a code a value and a scale for 256 of them."""
CONTEXT_BYTES = GIB
"""CUDA's own, with the workspaces of cuBLAS, cuDNN and NCCL."""
_FILLED = 0.92
"""Share of a GPU's memory that a plan fills; the rest is the allocator's waste."""
_SURE = 0.95
"""Share of the estimate that is certainly needed: what exceeds the GPU by it is refused."""
_STATE_BYTES = {ADAMW_8BIT: 2.04, "lion": 4.0, "adagrad": 4.0, "muon": 4.0}
"""Optimiser state of a parameter where it is not Adam's two moments in fp32."""
_HALF = ("bf16", "fp16", "fp8")
_SLOW_BYTES = 2 * 10**9
"""Gradients of a step that GPUs without NVLink exchange in about a tenth of a second."""


@dataclass(frozen=True)
class Machine:
    """What this machine offers."""

    num_gpus: int
    cores: int
    gpu_memory_bytes: int | None
    host_memory_bytes: int | None = None
    nvlink: bool | None = None
    """Whether NVLink joins all GPUs; None: one GPU, or unknown."""
    compiles: bool = True
    """Whether torch.compile finds the C compiler and Python's headers that its kernels need."""


@dataclass(frozen=True)
class ModelFacts:
    """Counts of the built model at the run's image size."""

    parameters: int
    forward_flops: int
    """Floating-point operations of one image's forward pass; a multiply-add counts as two."""
    activation_bytes: int
    """Bytes kept for backward per image in fp32."""
    has_batchnorm: bool
    checkpointed_bytes: int = 0
    """The same with activation checkpointing: inputs of all blocks, and the largest block."""
    block_parameters: int = 0
    """Parameters of the largest block, which FSDP gathers at once."""
    blocks: int = 0


@dataclass(frozen=True)
class Layout:
    """Who holds what."""

    strategy: str
    shard: str
    shard_processes: int
    """Processes that share one copy of the model."""
    offload: bool = False

    @property
    def sharded(self) -> bool:
        return self.strategy in ("fsdp", "hsdp")

    def __str__(self) -> str:
        """As it is typed, after ``strategy=``."""
        shard = f" strategy.shard={self.shard}" if self.sharded else ""
        return self.strategy + shard + (" strategy.cpu_offload=true" if self.offload else "")


@dataclass(frozen=True)
class Load:
    """What a device is to compute."""

    micro: int
    """Images of one forward pass."""
    accumulation: int


def memory(config: Config, layout: Layout, load: Load, model: ModelFacts) -> dict[str, int]:
    """Bytes of one device by what they hold, without the device's own context.

    Autocast keeps copies of the weights in the compute type; FSDP gathers weights in it. Gradients
    that are not reduced before the last micro-batch are whole.
    """
    fp32 = 4 * model.parameters
    half = config.precision.name in _HALF
    share = layout.shard_processes
    kept = {
        "parameters": fp32 // share,
        "gradients": fp32 // share,
        "optimiser": int(model.parameters * _state_bytes(config)) // share,
        "ema": fp32 // share if config.ema.enabled else 0,
    }
    copies = 2 * model.parameters if half else 0
    if layout.sharded:
        # BatchNorm's kernels need fp32 weights.
        size = 2 if half and not model.has_batchnorm else 4
        copies = size * model.parameters
        if layout.shard == "full" and model.blocks:
            outside = model.parameters - model.blocks * model.block_parameters
            ahead = 2 + max(1, config.strategy.prefetch)  # the running one, its gradients
            copies = size * min(model.parameters, max(0, outside) + ahead * model.block_parameters)
        if config.strategy.wrap == "model":
            # All gradients beside what was gathered; then beside the fp32 buffer that sends them.
            copies = size * model.parameters + max(size * model.parameters, fp32)
        if layout.offload:
            kept = {}
        if layout.shard != "full" and load.accumulation > 1:
            kept["gradients"] = fp32
    activations = model.activation_bytes // (2 if half else 1)
    if config.model.activation_checkpointing:
        # What enters a block is the residual stream, fp32 under autocast, too.
        activations = min(activations, model.checkpointed_bytes or activations)
    return kept | {
        "copies": copies,
        "activations": activations * load.micro,
    }


def host_bytes(config: Config, layout: Layout, per_node: int, model: ModelFacts) -> int:
    """Bytes that the processes of a node keep in host memory for the device."""
    if not layout.offload:
        return 0
    each = 8 + _state_bytes(config) + (4 if config.ema.enabled else 0)
    return int(model.parameters * each) * per_node // layout.shard_processes


def largest_micro(
    config: Config, layout: Layout, most: int, model: ModelFacts, gpu_bytes: int | None
) -> int:
    """Images of a forward pass, at most ``most``, with which the estimate fits; at least 1."""
    if gpu_bytes is None:
        return most
    accumulates = Load(1, 2 if most > 1 else 1)
    parts = memory(config, layout, accumulates, model)
    left = gpu_bytes * _FILLED - CONTEXT_BYTES - sum(parts.values()) + parts["activations"]
    return max(1, min(most, int(left // max(1, parts["activations"]))))


def needed(config: Config, layout: Layout, load: Load, model: ModelFacts) -> int:
    """All bytes of one GPU."""
    return CONTEXT_BYTES + sum(memory(config, layout, load, model).values())


def misfit(
    config: Config,
    layout: Layout,
    model: ModelFacts,
    machine: Machine,
    world: int,
    per_node: int,
) -> str | None:
    """What does not fit GPU or host with even a single image at a time, and what would."""
    gpu, one = machine.gpu_memory_bytes, Load(1, 1)
    host, has = host_bytes(config, layout, per_node, model), machine.host_memory_bytes
    if has is not None and host > has:
        return (
            f"strategy = {layout}: the processes of a node need about {host / GIB:.0f} GiB of host "
            f"memory, which has {has / GIB:.0f}: use strategy.cpu_offload=false, or more nodes"
        )
    if gpu is None or needed(config, layout, one, model) * _SURE <= gpu:
        return None
    ways = [way for way, need in _ways(config, layout, model, machine, world) if need <= gpu]
    advice = f"use {', or '.join(ways[:3])}" if ways else "take a smaller model, or larger GPUs"
    return (
        f"strategy = {layout}: {config.model.name} needs about "
        f"{needed(config, layout, one, model) / GIB:.0f} GiB of a GPU that has {gpu / GIB:.0f}, "
        f"with one image at a time: {advice}"
    )


def choose(
    config: Config, model: ModelFacts, machine: Machine, nodes: int, per_node: int, on_gpu: bool
) -> tuple[Layout, str]:
    """What ``strategy=auto`` means here, and why, in one sentence."""
    world = nodes * per_node
    plain = Layout("single" if world == 1 else "ddp", "none", 1)
    gpu = machine.gpu_memory_bytes
    if not on_gpu or gpu is None:
        return plain, "one process" if world == 1 else f"{world} processes"
    layouts = [plain]
    if nodes > 1 and per_node > 1:
        # Weights are gathered within a node; between nodes travels a node's share of gradients.
        layouts += [Layout("hsdp", shard, per_node) for shard in ("grad_op", "full")]
    if world > 1:
        layouts += [Layout("fsdp", shard, world) for shard in ("grad_op", "full")]
    away = Layout("fsdp", "full", world, offload=True)
    if config.optimizer.name.lower() == ADAMW_8BIT:
        layouts, away = [plain], plain  # its blocks of 256 values would change with the shards
    most = math.ceil(config.batch.global_batch / world)
    micro = config.batch.micro_batch
    asked = most if micro is None else 1 if micro == "auto" else micro
    # Slow as it is: not for a large micro-batch alone, which the user can make smaller.
    for size, among in ((asked, layouts), (1, layouts), (asked, [away]), (1, [away])):
        load = Load(size, math.ceil(most / size))
        needs = {each: needed(config, each, load, model) for each in [*layouts, *among]}
        fitting = [each for each in among if needs[each] <= _FILLED * gpu]
        if fitting:
            chosen = _on_the_wire(config, fitting, most, model, machine)
            return chosen, _why(chosen, needs, gpu, machine)
    return away, "nothing else fits"  # nor this: the refusal that follows says what would


def _on_the_wire(
    config: Config, fitting: list[Layout], most: int, model: ModelFacts, machine: Machine
) -> Layout:
    """The first that fits; ``grad_op`` instead of DDP where links are slow and it sends less.

    A process sends gradients twice under DDP (fp32, there and back); under ``grad_op`` once, and
    weights in the compute type once a forward pass.
    """
    first, ddp = fitting[0], 8 * model.parameters
    others = [each for each in fitting if each.shard == "grad_op"]
    if machine.nvlink is not False or first.strategy != "ddp" or ddp < _SLOW_BYTES or not others:
        return first
    micro = config.batch.micro_batch
    if micro == "auto":
        micro = largest_micro(config, others[0], most, model, machine.gpu_memory_bytes)
    half = config.precision.name in _HALF and not model.has_batchnorm
    gathered = math.ceil(most / (micro or most)) * (2 if half else 4)
    return others[0] if (4 + gathered) * model.parameters < ddp else first


def _why(chosen: Layout, needs: dict[Layout, int], gpu: int, machine: Machine) -> str:
    def told(layout: Layout) -> str:
        short = layout.shard if layout.strategy == "fsdp" else layout.strategy
        return f"{short}{' offload' * layout.offload} {needs[layout] / GIB:.1f}"

    size = f"{needs[chosen] / GIB:.1f} of {gpu / GIB:.0f} GiB"
    before = list(needs)[: list(needs).index(chosen)]
    if not before:
        whose = "the" if chosen.strategy == "single" else "every"
        return f"{size}, so {whose} GPU holds the whole model"
    larger = [each for each in before if needs[each] > _FILLED * gpu]
    if not larger:
        return f"{size}; without NVLink, because it sends less than {before[0].strategy}"
    slow = "; without NVLink, gathering weights limits the speed" * (machine.nvlink is False)
    return f"{size}; {', '.join(map(told, larger))} would not fit{slow}"


def _ways(
    config: Config, layout: Layout, model: ModelFacts, machine: Machine, world: int
) -> Iterator[tuple[str, int]]:
    """Changes and the bytes of a GPU with each, what costs least speed first."""
    one = Load(1, 1)
    block = " strategy.wrap=block" if config.strategy.wrap == "model" else ""

    def way(other: Layout, need: int, gpus: str = "", beside: str = "") -> str:
        return f"strategy={other}{block}{gpus} ({need / GIB:.0f} GiB{beside})"

    def with_changes(section: str, change: dict[str, object]) -> Config:
        changed = getattr(config, section).model_copy(update=change)
        return config.model_copy(update={section: changed})

    if block:
        config = with_changes("strategy", {"wrap": "block"})
        need = needed(config, layout, one, model)
        yield f"{block.strip()} ({need / GIB:.0f} GiB)", need
    if not config.model.activation_checkpointing:
        thrifty = with_changes("model", {"activation_checkpointing": True})
        need = needed(thrifty, layout, one, model)
        yield f"model.activation_checkpointing=true{block} ({need / GIB:.0f} GiB)", need
    for shard in ("grad_op", "full"):
        other = Layout("fsdp", shard, world)
        if world > 1 and other != layout:
            need = needed(config, other, one, model)
            yield way(other, need), need
    gpus = next(
        (
            n
            for n in (2, 4, 8, 16, 32, 64)
            if n > world
            and needed(config, Layout("fsdp", "full", n), one, model)
            <= _FILLED * (machine.gpu_memory_bytes or 0)
        ),
        None,
    )
    if gpus is not None:
        other = Layout("fsdp", "full", gpus)
        need = needed(config, other, one, model)
        yield way(other, need, gpus=f" on {gpus} GPUs"), need
    if config.optimizer.name.lower() in ("adam", "adamw") and not layout.sharded:
        need = needed(with_changes("optimizer", {"name": ADAMW_8BIT}), layout, one, model)
        yield f"optimizer.name={ADAMW_8BIT} ({need / GIB:.0f} GiB)", need
    if not layout.offload:
        away = replace(Layout("fsdp", "full", world), offload=True)
        host = host_bytes(config, away, world, model)
        if machine.host_memory_bytes is None or host < machine.host_memory_bytes:
            need = needed(config, away, one, model)
            yield way(away, need, beside=f", {host / GIB:.0f} of host memory"), need


def _state_bytes(config: Config) -> float:
    name = config.optimizer.name.lower()
    if name == "sgd":
        return 4.0 if config.optimizer.kwargs.get("momentum") else 0.0
    return _STATE_BYTES.get(name, 8.0)
