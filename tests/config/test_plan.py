"""The plan: all arithmetic of a run from plain facts, and what fits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lockstep.config.plan import GIB, DataFacts, Machine, ModelFacts, Plan
from lockstep.errors import UserError
from tests.config.facts import CPU, EIGHT, MODEL, gpus, plan

# --- arithmetic -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "machine, overrides, expected",
    [
        pytest.param(CPU, [], {"strategy": "single", "world_size": 1}, id="cpu alone"),
        pytest.param(
            CPU, ["launch.processes=3"], {"strategy": "ddp", "world_size": 3}, id="cpu processes"
        ),
        pytest.param(
            EIGHT, [], {"device": "cuda", "strategy": "ddp", "world_size": 8}, id="all GPUs"
        ),
        pytest.param(
            EIGHT, ["launch.processes=1"], {"strategy": "single", "world_size": 1}, id="one GPU"
        ),
        pytest.param(
            EIGHT,
            ["device=cpu"],
            {"device": "cpu", "strategy": "single", "world_size": 1, "gpu_memory_bytes": None},
            id="cpu although GPUs",
        ),
        pytest.param(
            EIGHT,
            ["strategy=dp"],
            {"world_size": 1, "devices_per_process": 8},
            id="dp takes all GPUs",
        ),
        pytest.param(
            EIGHT, ["strategy=single"], {"world_size": 1, "devices_per_process": 1}, id="single"
        ),
        pytest.param(
            EIGHT,
            ["launch.nodes=2", "launch.rendezvous=node0:29500"],
            {"world_size": 16, "strategy": "ddp"},
            id="two nodes",
        ),
        pytest.param(EIGHT, ["strategy=fsdp"], {"shard_processes": 8}, id="fsdp shards over all"),
        pytest.param(
            EIGHT, ["strategy=fsdp", "strategy.shard=none"], {"shard_processes": 1}, id="fsdp none"
        ),
        pytest.param(EIGHT, ["strategy=hsdp"], {"shard_processes": 4}, id="hsdp: half a node"),
        pytest.param(
            EIGHT,
            ["strategy=hsdp", "launch.nodes=2", "launch.rendezvous='[::1]:29500'"],
            {"shard_processes": 8, "world_size": 16},
            id="hsdp: a node",
        ),
        pytest.param(
            EIGHT, ["strategy=hsdp", "strategy.shard_processes=2"], {"shard_processes": 2}, id="2x4"
        ),
        pytest.param(
            CPU, ["strategy=hsdp", "launch.processes=1"], {"shard_processes": 1}, id="hsdp alone"
        ),
    ],
)
def test_devices(machine: Machine, overrides: list[str], expected: dict[str, Any]) -> None:
    result = plan(*overrides, machine=machine)
    assert {key: getattr(result, key) for key in expected} == expected


@pytest.mark.parametrize(
    "size, processes, micro, expected",
    [
        pytest.param(64, 1, None, (64, None, 1), id="whole batch"),
        pytest.param(64, 4, None, (16, None, 1), id="even slices"),
        pytest.param(20, 3, None, (7, None, 1), id="slices that differ by one"),
        pytest.param(64, 4, 8, (8, 8, 2), id="accumulation"),
        pytest.param(64, 4, 16, (16, 16, 1), id="micro is the slice"),
        pytest.param(20, 3, 4, (4, 4, 2), id="idle in the last round"),
        pytest.param(64, 1, 10, (10, 10, 7), id="micro does not divide"),
        pytest.param(2, 4, None, (1, None, 1), id="fewer samples than processes"),
        pytest.param(64, 1, 64, (64, 64, 1), id="micro is the batch"),
        pytest.param(1, 1, None, (1, None, 1), id="one sample"),
    ],
)
def test_batches(
    size: int, processes: int, micro: int | None, expected: tuple[int, int | None, int]
) -> None:
    given = [] if micro is None else [f"batch.micro={micro}"]
    result = plan(f"batch.global={size}", f"launch.processes={processes}", *given)
    assert (result.micro_batch, result.fixed_micro, result.accumulation) == expected
    assert result.micro_batch * result.accumulation * processes >= size


@pytest.mark.parametrize(
    "overrides, expected",
    [
        pytest.param(["batch.global=100", "epochs=3"], (10, 30, 100), id="divides"),
        pytest.param(["batch.global=64", "epochs=3"], (16, 48, 40), id="last window is shorter"),
        pytest.param(["batch.global=64", "steps=5"], (16, 5, 40), id="steps instead of epochs"),
        pytest.param(["batch.global=64", "steps=500"], (16, 500, 40), id="steps beyond epochs"),
        pytest.param(["batch.global=5000", "epochs=2"], (1, 2, 1000), id="more than there is"),
        pytest.param(["batch.global=999", "epochs=1"], (2, 2, 1), id="one sample left"),
    ],
)
def test_steps(overrides: list[str], expected: tuple[int, int, int]) -> None:
    result = plan(*overrides)
    assert (result.steps_per_epoch, result.total_steps, result.last_window) == expected


@pytest.mark.parametrize(
    "overrides, expected",
    [
        pytest.param(["schedule.warmup_epochs=2"], 32, id="epochs"),
        pytest.param(["schedule.warmup_epochs=0.5"], 8, id="part of an epoch"),
        pytest.param(["schedule.warmup_epochs=0"], 0, id="none"),
        pytest.param(["schedule.warmup_epochs=99"], 160, id="at most half of the run"),
        pytest.param(["schedule.warmup_epochs=2", "steps=1"], 0, id="one step"),
    ],
)
def test_warm_up(overrides: list[str], expected: int) -> None:
    assert plan("batch.global=64", "epochs=20", *overrides).warmup_steps == expected


@pytest.mark.parametrize(
    "overrides, lr, rule",
    [
        pytest.param(["optimizer.base_batch=null"], 0.1, "as given", id="as given"),
        pytest.param(["optimizer.base_batch=256"], 0.025, "0.1 x 64 / 256", id="linear scaling"),
        pytest.param(["optimizer.base_batch=32"], 0.2, "0.1 x 64 / 32", id="scaled up"),
    ],
)
def test_learning_rate(overrides: list[str], lr: float, rule: str) -> None:
    result = plan("batch.global=64", "optimizer=sgd", "optimizer.lr=0.1", *overrides)
    assert result.peak_lr == pytest.approx(lr)
    assert rule in result.lr_rule


def test_learning_rate_does_not_depend_on_the_processes() -> None:
    one, many = (plan("optimizer=sgd", f"launch.processes={n}") for n in (1, 8))
    assert one.peak_lr == many.peak_lr


@pytest.mark.parametrize(
    "overrides, threads",
    [
        pytest.param([], 4, id="all cores"),
        pytest.param(["launch.processes=3"], 1, id="shared, rounded down"),
        pytest.param(["launch.processes=9"], 1, id="at least one"),
        pytest.param(["data.workers=7"], 7, id="given"),
    ],
)
def test_threads(overrides: list[str], threads: int) -> None:
    assert plan(*overrides).threads == threads


# --- memory -----------------------------------------------------------------------------------


def memory(*overrides: str) -> dict[str, int]:
    return plan(*overrides, "batch.global=64", machine=EIGHT).memory_bytes


WEIGHTS = 4 * MODEL.parameters


@pytest.mark.parametrize(
    "overrides, expected",
    [
        pytest.param(
            ["strategy=single"],
            {"parameters": WEIGHTS, "gradients": WEIGHTS, "optimiser": 2 * WEIGHTS, "ema": 0},
            id="single adamw",
        ),
        pytest.param(["optimizer=sgd"], {"optimiser": WEIGHTS}, id="sgd with momentum"),
        pytest.param(
            ["optimizer=sgd", "optimizer.kwargs.momentum=0"], {"optimiser": 0}, id="plain sgd"
        ),
        pytest.param(["ema.enabled=true"], {"ema": WEIGHTS}, id="ema"),
        pytest.param(
            ["strategy=fsdp", "ema.enabled=true"],
            {
                "parameters": WEIGHTS // 8,
                "gradients": WEIGHTS // 8,
                "optimiser": 2 * WEIGHTS // 8,
                "ema": WEIGHTS // 8,
                "copies": 4 * (40_000 + 3 * 80_000),
            },
            id="fsdp full",
        ),
        pytest.param(
            ["strategy=fsdp", "precision=bf16", "strategy.prefetch=3"],
            {"copies": 2 * (40_000 + 5 * 80_000)},
            id="fsdp full gathers blocks in bf16",
        ),
        pytest.param(
            ["strategy=fsdp", "strategy.shard=grad_op"],
            {"parameters": WEIGHTS // 8, "gradients": WEIGHTS // 8, "copies": WEIGHTS},
            id="fsdp grad_op",
        ),
        pytest.param(
            ["strategy=fsdp", "strategy.shard=grad_op", "precision=bf16", "batch.micro=1"],
            {"parameters": WEIGHTS // 8, "gradients": WEIGHTS, "copies": WEIGHTS // 2},
            id="fsdp grad_op accumulates whole gradients",
        ),
        pytest.param(
            ["strategy=fsdp", "strategy.shard=grad_op", "strategy.wrap=model"],
            {"parameters": WEIGHTS // 8, "gradients": WEIGHTS // 8, "copies": 2 * WEIGHTS},
            id="fsdp wrap=model holds all gradients",
        ),
        pytest.param(
            [*("strategy=fsdp", "strategy.shard=grad_op"), "strategy.wrap=model", "precision=bf16"],
            {"copies": WEIGHTS // 2 + WEIGHTS},
            id="fsdp wrap=model sends in fp32",
        ),
        pytest.param(["strategy=ddp"], {"copies": 0, "CUDA": GIB}, id="ddp"),
        pytest.param(["strategy=ddp", "precision=bf16"], {"copies": WEIGHTS // 2}, id="autocast"),
        pytest.param(
            ["strategy=ddp", "model.activation_checkpointing=true", "precision=bf16"],
            {"activations": 8 * 10**5},
            id="checkpointing keeps the residual stream in fp32",
        ),
        pytest.param(
            ["strategy=hsdp"], {"parameters": WEIGHTS // 4, "gradients": WEIGHTS // 4}, id="hsdp"
        ),
        pytest.param(["strategy=ddp"], {"activations": 8 * 10**6}, id="activations of a slice"),
        pytest.param(["precision=bf16"], {"activations": 4 * 10**6}, id="half precision"),
        pytest.param(["batch.micro=2"], {"activations": 2 * 10**6}, id="micro-batch"),
    ],
)
def test_memory(overrides: list[str], expected: dict[str, int]) -> None:
    found = memory(*overrides)
    assert {key: found[key] for key in expected} == expected


def test_checkpointing_and_offload_need_less() -> None:
    assert memory("model.activation_checkpointing=true")["activations"] < memory()["activations"]
    kept = memory("strategy=fsdp", "strategy.cpu_offload=true").keys()
    assert kept == {"copies", "activations", "CUDA"}


SEVEN_B = ModelFacts(
    parameters=6_720_127_976,
    forward_flops=2_725_494_849_536,
    activation_bytes=2_582_087_880,
    has_batchnorm=False,
    checkpointed_bytes=196_899_672,
    block_parameters=167_821_312,
    blocks=40,
)
"""vit_7b at 224 px, as counted."""


LARGE = ["model=vit_7b", "precision=bf16", "batch.global=256", "batch.micro=auto"]
NODES = ["launch.nodes=4", "launch.rendezvous=a:1"]
GIANT = replace(SEVEN_B, parameters=10**9, block_parameters=25 * 10**6)


@pytest.mark.parametrize(
    "machine, model, overrides, strategy, why",
    [
        pytest.param(
            gpus(1, 140), SEVEN_B, [], "single", "113.8 of 140 GiB, so the GPU", id="h200"
        ),
        pytest.param(
            gpus(8, 140), SEVEN_B, [], "ddp", "so every GPU holds the whole model", id="8 h200"
        ),
        pytest.param(
            gpus(8, 80),
            SEVEN_B,
            [],
            "fsdp strategy.shard=grad_op",
            "ddp 113.8 would not fit",
            id="grad_op",
        ),
        pytest.param(
            gpus(8, 24),
            SEVEN_B,
            [],
            "fsdp strategy.shard=full",
            "of 24 GiB; ddp 113.8, grad_op 48.1 would not fit",
            id="full",
        ),
        pytest.param(
            gpus(8, 24, nvlink=False),
            SEVEN_B,
            [],
            "fsdp strategy.shard=full",
            "without NVLink, gathering weights limits the speed",
            id="full over slow links",
        ),
        pytest.param(
            gpus(1, 80),
            SEVEN_B,
            [],
            "fsdp strategy.shard=full strategy.cpu_offload=true",
            "single 113.8 would not fit",
            id="offload",
        ),
        pytest.param(
            gpus(8, 80), SEVEN_B, NODES, "hsdp strategy.shard=grad_op", "ddp 113.8", id="hsdp"
        ),
        pytest.param(
            gpus(8, 24), SEVEN_B, NODES, "hsdp strategy.shard=full", "hsdp 48.1", id="hsdp full"
        ),
        pytest.param(gpus(8, 80), GIANT, [], "ddp", "holds the whole model", id="1 B over NVLink"),
        pytest.param(
            gpus(8, 80, nvlink=False),
            GIANT,
            [],
            "fsdp strategy.shard=grad_op",
            "without NVLink, because it sends less than ddp",
            id="1 B over slow links",
        ),
        pytest.param(
            gpus(8, 80, nvlink=False), MODEL, [], "ddp", "holds the whole model", id="small"
        ),
        pytest.param(
            gpus(1, 140),
            SEVEN_B,
            ["batch.micro=null"],
            "single",
            "the GPU holds the whole model",
            id="a large micro-batch is no reason for offload",
        ),
    ],
)
def test_auto(
    machine: Machine, model: ModelFacts, overrides: list[str], strategy: str, why: str
) -> None:
    found = plan(*LARGE, *overrides, machine=machine, model=model)
    assert str(found.layout) == strategy
    assert why in found.strategy_rule
    row = next(line for line in found.text().splitlines() if line.startswith("strategy"))
    assert f"{strategy} (chosen by auto: {found.strategy_rule[16:]}" in row


@pytest.mark.parametrize(
    "machine, overrides, told",
    [
        pytest.param(
            gpus(2, 80),
            ["strategy=ddp"],
            "strategy = ddp: vit_7b_patch16_dinov3 needs about 114 GiB of a GPU that has 80, with "
            "one image at a time: use strategy=fsdp strategy.shard=grad_op (64 GiB), or "
            "strategy=fsdp strategy.shard=full (52 GiB)",
            id="ddp",
        ),
        pytest.param(
            gpus(1, 80),
            ["strategy=single"],
            "use strategy=fsdp strategy.shard=full on 2 GPUs (52 GiB)",
            id="single",
        ),
        pytest.param(
            gpus(8, 40),
            ["strategy=fsdp", "strategy.shard=grad_op", "strategy.wrap=model"],
            "use strategy.wrap=block (26 GiB), or "
            "strategy=fsdp strategy.shard=full strategy.wrap=block (15 GiB)",
            id="wrap=model",
        ),
        pytest.param(
            gpus(8, 40),
            ["strategy=fsdp", "strategy.shard=grad_op", "strategy.wrap=model",
             "model.activation_checkpointing=false"],
            "or model.activation_checkpointing=true strategy.wrap=block (26 GiB)",
            id="wrap=model, not recomputed",
        ),
        pytest.param(
            gpus(1, 80, host=64),
            [],
            "strategy.cpu_offload=true: the processes of a node need about 100 GiB of host memory, "
            "which has 64",
            id="neither GPU nor host",
        ),
        pytest.param(
            gpus(1, 116),
            ["strategy=single", "model.activation_checkpointing=false", "batch.micro=1",
             "model.kwargs={}", "ema.enabled=true"],
            "or strategy=fsdp strategy.shard=full strategy.cpu_offload=true (3 GiB, 125 of host",
            id="offload is offered",
        ),
    ],
)  # fmt: skip
def test_what_cannot_fit_is_refused(machine: Machine, overrides: list[str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*LARGE, *overrides, machine=machine, model=SEVEN_B)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_what_the_run_is_too_short_or_small_for_is_told() -> None:
    words = ["steps=10", "schedule.warmup_epochs=1", "batch.global=100"]
    images = DataFacts(num_train=1000, num_val=10, num_classes=10)
    (note,) = plan(*words, data=images).notes
    assert note == "schedule.warmup_epochs = 1 would be 10 of 10 steps: cut to half of them"
    (note,) = plan("schedule.warmup_epochs=0", "batch.global=1001", data=images).notes
    assert "batch.global = 1001 is more than the 1,000 images there are" in note


def test_what_may_not_fit_is_told() -> None:
    found = plan(*LARGE, "batch.micro=128", machine=gpus(1, 140), model=SEVEN_B)
    assert "128 images a forward pass may not fit the GPU: batch.micro=82" in found.notes[0]


def test_micro_batch_by_trying_begins_with_an_estimate() -> None:
    found = plan(*LARGE, machine=gpus(1, 140), model=SEVEN_B)
    assert found.tries_micro
    assert (found.micro_batch, found.fixed_micro, found.accumulation) == (64, 64, 4)
    assert "batch.micro=auto" in found.text()
    tried = found.with_micro(86)
    assert (tried.micro_batch, tried.fixed_micro, tried.accumulation) == (86, 86, 3)
    assert not tried.tries_micro and "batch.micro=auto" not in tried.text()


# --- on paper ---------------------------------------------------------------------------------


def test_json_there_and_back() -> None:
    result = plan("launch.processes=3", "batch.global=20", "batch.micro=4")
    raw = json.loads(json.dumps(result.to_json()))
    assert Plan.from_json(raw) == result
    assert raw["world_size"] == 3


def test_text_tells_what_the_user_asks_for() -> None:
    text = plan("strategy=dp", "optimizer=sgd", "batch.global=64", machine=EIGHT).text()
    for told in (
        "1 node(s) x 1 process(es) on cuda, 8 devices each",
        "1,000 train, 100 val, 10 classes at 32 px",
        "64 = up to 8 a forward pass x 8 device(s) x 1 accumulation",
        "320 (16 an epoch, the last of 40 samples; 32 warm-up)",
        "0.025 = 0.1 x 64 / 256 (linear scaling)",
        "1.00 M",
        "1.00 G an image forward",
        "GiB of 80",
        "64 thread(s)",
    ):
        assert told in text, told
