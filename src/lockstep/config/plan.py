"""The plan of a run: all arithmetic, and every refusal in one message, before anything starts.

Pure functions of the typed configuration and of plain facts about the machine, the data and the
model; imports no torch, so that it can be tested and printed anywhere.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lockstep.config import passes, refusals, sizing
from lockstep.config.schema import Config
from lockstep.config.sizing import GIB, Layout, Load, Machine, ModelFacts
from lockstep.errors import UserError

__all__ = ["GIB", "DataFacts", "Machine", "ModelFacts", "Plan", "even_micro", "make_plan",
           "replan", "resolve_device"]  # fmt: skip


@dataclass(frozen=True)
class DataFacts:
    """Sizes of the data set."""

    num_train: int
    num_val: int
    num_classes: int


@dataclass(frozen=True)
class Plan:
    """Derived numbers of a run; everything that is not a preference."""

    device: str
    strategy: str
    shard: str
    cpu_offload: bool
    strategy_rule: str
    nodes: int
    processes_per_node: int
    devices_per_process: int
    shard_processes: int
    global_batch: int
    micro_batch: int
    fixed_micro: int | None
    tries_micro: bool
    """``micro_batch`` is an estimate, to be replaced by what the device holds (batch.micro=auto)."""
    accumulation: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int
    last_window: int
    peak_lr: float
    lr_rule: str
    image_size: int
    compile: str
    reduce: str
    """``strategy.reduce``, decided."""
    records: bool
    """Whether passes are recorded as CUDA graphs."""
    threads: int
    data: DataFacts
    model: ModelFacts
    memory_bytes: dict[str, int]
    gpu_memory_bytes: int | None
    nvlink: bool | None
    notes: list[str] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes_per_node

    def to_json(self) -> dict[str, Any]:
        """Plain values, as written to ``plan.json``."""
        return asdict(self) | {"world_size": self.world_size}

    @property
    def layout(self) -> Layout:
        """Who holds what."""
        return Layout(self.strategy, self.shard, self.shard_processes, self.cpu_offload)

    def with_micro(self, micro: int) -> Plan:
        """The plan with the micro-batch that was found by trying (``batch.micro=auto``)."""
        lanes = self.world_size * self.devices_per_process
        return replace(
            self,
            micro_batch=micro,
            fixed_micro=micro,
            accumulation=math.ceil(self.global_batch / (micro * lanes)),
            tries_micro=False,
        )

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Plan:
        """The inverse of :meth:`to_json`."""
        values = {k: v for k, v in raw.items() if k != "world_size"}
        values["data"] = DataFacts(**values["data"])
        values["model"] = ModelFacts(**values["model"])
        return cls(**values)

    def text(self) -> str:
        """The plan as an aligned table."""
        total = sum(self.memory_bytes.values())
        flops = 3 * self.model.forward_flops * self.global_batch
        parts = ", ".join(f"{k} {v / GIB:.2f}" for k, v in self.memory_bytes.items() if v)
        rounds = f"x {self.accumulation} accumulation"
        if self.tries_micro:
            rounds += "; batch.micro=auto tries at the start"
        of = f" of {self.gpu_memory_bytes / GIB:.0f}" if self.gpu_memory_bytes else ""
        devices = f"{self.nodes} node(s) x {self.processes_per_node} process(es) on {self.device}"
        if self.devices_per_process > 1:
            devices += f", {self.devices_per_process} devices each"
        after = " strategy.reduce=after" if (self.strategy, self.reduce) == ("ddp", "after") else ""
        why = f" ({self.strategy_rule})" if self.strategy_rule else ""
        rows = [
            ("strategy", f"{self.layout}{after}{why}"),
            ("devices", devices),
            ("data", (f"{self.data.num_train:,} train, {self.data.num_val:,} val, "
                      f"{self.data.num_classes:,} classes at {self.image_size} px")),
            ("global batch", (f"{self.global_batch} = up to {self.micro_batch} a forward pass "
                              f"x {self.world_size * self.devices_per_process} device(s) {rounds}")),
            ("steps", (f"{self.total_steps:,} ({self.steps_per_epoch:,} an epoch, "
                       f"the last of {self.last_window} samples; {self.warmup_steps:,} warm-up)")),
            ("peak lr", self.lr_rule),
            ("parameters", f"{self.model.parameters / 1e6:.2f} M"),
            ("FLOPs", (f"{self.model.forward_flops / 1e9:.2f} G an image forward, "
                       + (f"{flops / 1e12:.2f} T" if flops > 1e11 else f"{flops / 1e9:.2f} G")
                       + " a step")),
            ("memory/device", f"about {total / GIB:.2f} GiB{of} ({parts})"),
            ("compile", self.compile),
            ("decoding", f"{self.threads} thread(s) a process"),
        ]  # fmt: skip
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join(lines + [f"{'note':<{width}}  {note}" for note in self.notes])


def make_plan(config: Config, machine: Machine, data: DataFacts, model: ModelFacts) -> Plan:
    """Derive the plan.

    Raises:
        UserError: for every combination that cannot run, all of them in one message.
    """
    problems: list[str] = []
    notes: list[str] = []
    device = resolve_device(config, machine)
    processes, devices_each = _processes(config, machine, device, problems)
    world = processes * config.launch.max_nodes
    layout, why = _layout(config, machine, model, device, processes, problems)
    strategy = layout.strategy
    refusals.check_launch(config, model, problems, notes)
    refusals.check_strategy(config, strategy, problems, notes)
    refusals.check_batchnorm(config, device, strategy, world, model, problems, notes)
    refusals.check_precision(config, device, problems, notes)
    refusals.check_data(config, data.num_classes, device, problems)
    refusals.check_schedule(config, problems)

    batch = config.batch
    lanes = world * devices_each
    tries = batch.micro_batch == "auto"
    asked = None if batch.micro_batch == "auto" else batch.micro_batch
    if asked is not None and asked > batch.global_batch:
        problems.append(
            f"batch.micro = {asked} is larger than batch.global = "
            f"{batch.global_batch}: a forward pass cannot hold more than one optimiser step"
        )
    whole = math.ceil(batch.global_batch / lanes)
    micro = asked or whole
    gpu_bytes = machine.gpu_memory_bytes if device == "cuda" else None
    fitting = sizing.largest_micro(config, layout, micro, model, gpu_bytes)
    if tries:
        refusals.check_trial(config, model, fitting, problems)
        micro = even_micro(whole, math.ceil(whole / fitting))
    elif fitting < micro:
        notes.append(
            f"{micro} images a forward pass may not fit the GPU: batch.micro={fitting} by the "
            "estimate, or batch.micro=auto to try (without BatchNorm)"
        )
    accumulation = max(1, math.ceil(batch.global_batch / (micro * lanes)))
    steps_per_epoch = math.ceil(data.num_train / batch.global_batch)
    total_steps = config.steps or config.epochs * steps_per_epoch
    # A recorded pass keeps its memory; one of another size, at an epoch's end, needs as much again.
    twice = 2 * (whole if tries else micro)
    how = passes.decide(
        config,
        device,
        layout,
        machine,
        model,
        total_steps=total_steps,
        accumulation=accumulation,
        even=world == 1 or batch.global_batch == micro * lanes * accumulation,
        roomy=sizing.largest_micro(config, layout, twice, model, gpu_bytes) == twice,
        problems=problems,
    )
    if how.records and strategy == "fsdp" and world > 1:
        notes.append(
            "compile=graphs with strategy=fsdp records what is sent, too: tried on one GPU alone"
        )
    if batch.global_batch < lanes:
        notes.append(
            f"batch.global = {batch.global_batch} is smaller than {lanes} devices: "
            f"{lanes - batch.global_batch} of them compute nothing"
        )
    elif asked and (chunks := math.ceil(batch.global_batch / micro)) % lanes:
        notes.append(
            f"{chunks} micro-batches of {micro} over {lanes} devices: "
            f"{lanes - chunks % lanes} of them idle in the last of {accumulation} rounds"
        )

    warmup = _warmup(config, steps_per_epoch, total_steps, notes)
    if batch.global_batch > data.num_train:
        notes.append(
            f"batch.global = {batch.global_batch} is more than the {data.num_train:,} images there are: "
            "each step takes all of them, and no more"
        )
    peak, rule = peak_lr(config)
    if config.stop_at is not None and config.stop_at > total_steps:
        problems.append(f"stop_at = {config.stop_at} is after the last step {total_steps}")
    threads = config.data.workers or max(1, machine.cores // processes)
    if not problems and device == "cuda":
        problem = sizing.misfit(config, layout, model, machine, world, processes)
        problems += [problem] if problem else []
    if problems:
        raise UserError("\n".join(problems))
    return Plan(
        device=device,
        strategy=strategy,
        shard=layout.shard,
        cpu_offload=layout.offload,
        strategy_rule=why,
        nodes=config.launch.max_nodes,
        processes_per_node=processes,
        devices_per_process=devices_each,
        shard_processes=layout.shard_processes,
        global_batch=batch.global_batch,
        micro_batch=min(micro, batch.global_batch),
        fixed_micro=micro if tries else asked,
        tries_micro=tries,
        accumulation=accumulation,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        warmup_steps=warmup,
        last_window=data.num_train - (steps_per_epoch - 1) * batch.global_batch,
        peak_lr=peak,
        lr_rule=rule,
        image_size=config.model.image_size or config.data.image_size,
        compile=how.compile,
        reduce=how.reduce,
        records=how.records,
        threads=threads,
        data=data,
        model=model,
        memory_bytes=sizing.memory(config, layout, Load(micro, accumulation), model)
        | ({"CUDA": sizing.CONTEXT_BYTES} if device == "cuda" else {}),
        gpu_memory_bytes=gpu_bytes,
        nvlink=machine.nvlink,
        notes=notes,
    )


def replan(config: Config, plan: Plan, nodes: int) -> Plan:
    """The plan of an elastic run that has found ``nodes`` nodes.

    Raises:
        UserError: it cannot run on so many.
    """
    processes = plan.processes_per_node
    launch = config.launch.model_copy(update={"nodes": nodes, "processes": processes})
    config = config.model_copy(update={"launch": launch})
    machine = Machine(
        num_gpus=processes * plan.devices_per_process if plan.device == "cuda" else 0,
        cores=plan.threads * processes,
        gpu_memory_bytes=plan.gpu_memory_bytes,
        nvlink=plan.nvlink,
        compiles=plan.compile != "off",
    )
    return make_plan(config, machine, plan.data, plan.model)


def resolve_device(config: Config, machine: Machine) -> str:
    """``auto`` is CUDA where a GPU is visible."""
    if config.device == "auto":
        return "cuda" if machine.num_gpus else "cpu"
    if config.device == "cuda" and not machine.num_gpus:
        raise UserError(
            "device = cuda, but no GPU is visible: use device=cpu, or check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES"
        )
    return config.device


def _warmup(config: Config, steps_per_epoch: int, total_steps: int, notes: list[str]) -> int:
    """Steps, at most half of all."""
    epochs = config.schedule.warmup_epochs
    asked, most = round(epochs * steps_per_epoch), total_steps // 2
    if asked > most:
        notes.append(
            f"schedule.warmup_epochs = {epochs:g} would be {asked:,} of {total_steps:,} steps: cut to "
            "half of them"
        )
    return min(asked, most)


def even_micro(slice_size: int, rounds: int) -> int:
    """Images of a forward pass when ``slice_size`` of them take so many."""
    return math.ceil(slice_size / rounds)


def peak_lr(config: Config) -> tuple[float, str]:
    """Peak learning rate and the rule that gives it, in words.

    Linear scaling after Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv:1706.02677).
    """
    lr, base = config.optimizer.lr, config.optimizer.base_batch
    if base is None:
        return lr, f"{lr:g} (as given; optimizer.base_batch=null)"
    scaled = lr * config.batch.global_batch / base
    return scaled, f"{scaled:g} = {lr:g} x {config.batch.global_batch} / {base} (linear scaling)"


def _processes(
    config: Config, machine: Machine, device: str, problems: list[str]
) -> tuple[int, int]:
    """Processes of this node and devices of each."""
    wanted = config.launch.processes
    available = machine.num_gpus if device == "cuda" else None
    if config.strategy.name in ("single", "dp"):
        if wanted not in ("auto", 1) or config.launch.max_nodes > 1:
            problems.append(
                f"strategy = {config.strategy.name} is one process, but launch.processes = "
                f"{wanted} and launch.nodes = {config.launch.nodes}: use strategy=ddp or fsdp"
            )
        return 1, max(1, machine.num_gpus) if config.strategy.name == "dp" and available else 1
    processes = (available or 1) if wanted == "auto" else wanted
    if available is not None and processes > available:
        problems.append(
            f"launch.processes = {processes}, but {available} GPU(s) are visible: "
            f"use launch.processes={available}, or device=cpu"
        )
    return processes, 1


def _layout(
    config: Config,
    machine: Machine,
    model: ModelFacts,
    device: str,
    processes: int,
    problems: list[str],
) -> tuple[Layout, str]:
    """Who holds what, and why if that is left to us."""
    s, nodes = config.strategy, config.launch.max_nodes
    if s.name == "auto":
        layout, why = sizing.choose(config, model, machine, nodes, processes, device == "cuda")
        return layout, f"chosen by auto: {why}"
    shares = _shard_processes(config, s.name, processes * nodes, processes, problems)
    shard = s.shard if s.name in ("fsdp", "hsdp") else "none"
    return Layout(s.name, shard, shares, s.cpu_offload), ""


def _shard_processes(
    config: Config, strategy: str, world: int, per_node: int, problems: list[str]
) -> int:
    """Processes that share one copy of the model."""
    if strategy == "fsdp":
        return 1 if config.strategy.shard == "none" else world
    if strategy != "hsdp":
        return 1
    wanted = config.strategy.shard_processes
    if wanted is None:
        wanted = per_node if config.launch.max_nodes > 1 else max(1, world // 2)
    if world % wanted:
        problems.append(
            f"strategy.shard_processes = {wanted} does not divide {world} processes: use one of "
            f"{', '.join(str(d) for d in range(1, world + 1) if world % d == 0)}"
        )
    return wanted
