"""How forward and backward run: compiled, recorded as CUDA graphs, and when gradients are sent."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.schema import Config
from lockstep.config.sizing import Layout, Machine, ModelFacts

COMPILING_PAYS_FROM = 1000
"""Steps. Compiling takes about a minute, which a step of 40 ms earns back in 1,000 to 10,000."""


@dataclass(frozen=True)
class Passes:
    """What the keys ``compile`` and ``strategy.reduce`` come to."""

    compile: str
    reduce: str
    records: bool
    """Whether passes are recorded as CUDA graphs."""


def decide(
    config: Config,
    device: str,
    layout: Layout,
    machine: Machine,
    model: ModelFacts,
    *,
    total_steps: int,
    accumulation: int,
    even: bool,
    roomy: bool,
    problems: list[str],
) -> Passes:
    """Decide what is left to us; what is asked for and cannot be goes to ``problems``.

    Sharded passes are recorded when ``graphs`` is asked for by name: that has not been run on
    several GPUs.

    Args:
        accumulation: micro-batches of a step.
        even: all processes have equally many images in every micro-batch of a full step.
        roomy: the GPU holds activations twice, as a recorded pass beside another may need.
    """
    compiles = _compiles(config, device, layout.strategy, total_steps, machine, model)
    after = _reduces_after(config, device, layout.strategy, machine, compiles=compiles)
    instead = _recording_needs(config, layout, model, accumulation, after=after, even=even)
    problems += _what_is_against(config, device, layout.strategy, model, instead)
    recordable = device == "cuda" and not instead and not config.model.activation_checkpointing
    usual = recordable and layout.strategy != "fsdp"
    mode: str = config.compile
    if mode == "auto":
        mode = "off" if not compiles else "graphs" if usual and roomy else "default"
    return Passes(
        compile=mode,
        reduce="after" if after else "backward",
        records=(mode == "graphs" and recordable) or (mode == "max" and usual),
    )


def _compiles(
    config: Config,
    device: str,
    strategy: str,
    total_steps: int,
    machine: Machine,
    model: ModelFacts,
) -> bool:
    """Whether steps are compiled; ``auto``: on a GPU, where the run is long enough to earn it back."""
    if config.compile != "auto":
        return config.compile != "off"
    recomputes = config.model.activation_checkpointing
    short = total_steps < COMPILING_PAYS_FROM and config.precision.name != "fp8"
    fails = not machine.compiles or (recomputes and model.has_batchnorm)
    return not (device != "cuda" or strategy == "dp" or short or fails)


def _reduces_after(
    config: Config, device: str, strategy: str, machine: Machine, *, compiles: bool
) -> bool:
    """Whether DDP sends gradients after the backward pass."""
    asked = config.strategy.reduce
    if strategy != "ddp":
        return False
    if asked != "auto" or device != "cuda":
        return asked == "after"
    # torch's reducer lays gradients elsewhere after its first step, where sums over them may round
    # otherwise: a resumed ResNet-50 on two GPUs was not the same to the bit.
    quick = machine.nvlink and config.launch.max_nodes == 1
    return config.deterministic or config.compile == "graphs" or (compiles and bool(quick))


def _recording_needs(
    config: Config, layout: Layout, model: ModelFacts, accumulation: int, *, after: bool, even: bool
) -> list[str]:
    """What to change so that sends between GPUs do not keep a pass from being recorded."""
    if layout.strategy == "single":
        return []
    changes = {
        "strategy.sync_batchnorm=false": config.strategy.sync_batchnorm and model.has_batchnorm
    }
    if layout.strategy == "ddp":
        changes |= {"strategy.reduce=after": not after}
    elif layout.strategy == "fsdp":
        sharded = layout.shard in ("full", "grad_op")
        changes |= {
            "strategy.cpu_offload=false": layout.offload,
            "strategy.shard=full": not sharded or (layout.shard == "grad_op" and accumulation > 1),
            # NCCL's operations are recorded by all processes or by none.
            "a batch.global that micro-batches of all processes share evenly": not even,
            # What is even on some numbers of nodes is not on others.
            "a fixed launch.nodes": config.launch.elastic,
        }
    else:
        return ["strategy=ddp"]
    return [word for word, needed in changes.items() if needed]


def _what_is_against(
    config: Config, device: str, strategy: str, model: ModelFacts, recording_needs: list[str]
) -> list[str]:
    """Why the mode that is asked for cannot be."""
    mode = f"compile = {config.compile}"
    recomputes = config.model.activation_checkpointing
    problems = []
    if config.compile not in ("off", "auto") and recomputes and model.has_batchnorm:
        problems.append(
            f"model.activation_checkpointing = true with compile={config.compile}: torch.compile "
            "cannot recompute BatchNorm without counting its statistics twice; use one of the two"
        )
    if config.compile == "graphs" and device != "cuda":
        problems.append(f"{mode} needs a GPU, and device is {device}: use compile=default")
    elif config.compile == "graphs" and recording_needs:
        problems.append(
            f"{mode} with strategy={strategy}: what is sent between GPUs within a pass cannot be "
            f"recorded with these settings; use {' and '.join(recording_needs)}, or compile=default"
        )
    elif config.compile == "graphs" and recomputes:
        problems.append(
            f"{mode}: model.activation_checkpointing = true cannot be recorded; use compile=default"
        )
    return problems
