"""Settings that do not go together: refused in one line each, or told in the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.config.plan import ModelFacts
from lockstep.config.refusals import check_new
from lockstep.errors import UserError
from tests.config.facts import BATCHNORM, DATA, EIGHT, MODEL, ONE, plan
from tests.runs import configure


@pytest.mark.parametrize(
    "overrides, facts, message",
    [
        pytest.param(
            ["launch.processes=9"],
            {"machine": EIGHT},
            "launch.processes = 9, but 8 GPU(s) are visible: use launch.processes=8, or device=cpu",
            id="more processes than GPUs",
        ),
        pytest.param(["device=cuda"], {}, "device = cuda, but no GPU is visible", id="no GPU"),
        pytest.param(
            ["strategy=ddp", "launch.nodes=2"],
            {},
            "launch.nodes = 2 needs launch.rendezvous=HOST:PORT",
            id="nodes without a place to meet",
        ),
        *[
            pytest.param(
                [f"launch.rendezvous='{place}'", "launch.nodes=2", "strategy=ddp"],
                {},
                f"launch.rendezvous = {place}: expected HOST:PORT",
                id=f"rendezvous {place}",
            )
            for place in ("host", "host:", ":29500", "host:port", "host:0", "host:70000")
        ],
        pytest.param(
            ["strategy=single", "launch.processes=2"],
            {},
            "strategy = single is one process, but launch.processes = 2",
            id="single on two",
        ),
        pytest.param(
            ["strategy=dp", "launch.nodes=2", "launch.rendezvous=a:1"],
            {},
            "strategy = dp is one process",
            id="dp on two nodes",
        ),
        pytest.param(
            ["strategy=hsdp", "launch.processes=6", "strategy.shard_processes=4"],
            {},
            "strategy.shard_processes = 4 does not divide 6 processes: use one of 1, 2, 3, 6",
            id="hsdp does not divide",
        ),
        pytest.param(
            ["strategy=hsdp", "strategy.shard=none", "launch.processes=4"],
            {},
            "that is strategy=ddp",
            id="hsdp that shards nothing",
        ),
        pytest.param(
            ["strategy=fsdp", "strategy.reduce=after"],
            {"machine": EIGHT},
            "strategy.reduce = after needs strategy=ddp, not fsdp",
            id="reduction after nobody's pass",
        ),
        pytest.param(
            ["strategy=ddp", "strategy.shard=grad_op"],
            {"machine": EIGHT},
            "strategy.shard = grad_op needs strategy=fsdp or hsdp, not ddp",
            id="nothing is sharded",
        ),
        pytest.param(
            ["strategy=fsdp", "strategy.wrap=model"],
            {"machine": EIGHT},
            "it needs strategy=fsdp (or hsdp) with strategy.shard=grad_op",
            id="parameters of one group are not gathered twice",
        ),
        pytest.param(
            ["strategy=ddp", "strategy.wrap=model"],
            {"machine": EIGHT},
            "it needs strategy=fsdp (or hsdp) with strategy.shard=grad_op",
            id="nothing to gather",
        ),
        pytest.param(
            ["strategy=ddp", "strategy.cpu_offload=true"],
            {},
            "strategy.cpu_offload = true needs strategy=fsdp, not ddp",
            id="offload without fsdp",
        ),
        pytest.param(
            ["strategy.meta_init=true"],
            {},
            "strategy.meta_init = true needs strategy=fsdp, not single",
            id="meta init without fsdp",
        ),
        pytest.param(
            ["batch.micro=auto"],
            {"model": BATCHNORM},
            "batch.micro = auto: BatchNorm's statistics",
            id="another GPU, other BatchNorm",
        ),
        pytest.param(
            ["strategy=ddp", "strategy.sync_batchnorm=true"],
            {"model": BATCHNORM},
            "strategy.sync_batchnorm = true needs GPUs",
            id="synchronised BatchNorm on the CPU",
        ),
        pytest.param(
            ["compile=default", "model.activation_checkpointing=true"],
            {"model": BATCHNORM},
            "use one of the two",
            id="compiled checkpointing of BatchNorm",
        ),
        pytest.param(
            ["compile=graphs", "device=cpu"], {}, "use compile=default", id="graphs on the CPU"
        ),
        pytest.param(
            ["compile=graphs", "strategy=single", "model.activation_checkpointing=true"],
            {"machine": EIGHT},
            "cannot be recorded; use compile=default",
            id="recorded recomputing",
        ),
        pytest.param(
            ["compile=graphs", "strategy=single", "batch.micro=auto"],
            {"machine": ONE},
            "batch.micro = auto with compile=graphs",
            id="recorded trials",
        ),
        pytest.param(["precision=fp8"], {}, "precision = fp8 needs a GPU", id="8 bits on the CPU"),
        pytest.param(
            ["precision=fp8", "compile=off"],
            {"machine": EIGHT},
            "with compile=off is slower",
            id="8 bits not compiled",
        ),
        pytest.param(
            ["batch.micro=65", "batch.global=64"],
            {},
            "batch.micro = 65 is larger than batch.global = 64",
            id="micro above global",
        ),
        pytest.param(
            ["steps=5", "stop_at=6"], {}, "stop_at = 6 is after the last step 5", id="stop_at"
        ),
        pytest.param(
            [], {"data": replace(DATA, num_classes=1)}, "has 1 class: at least 2", id="one class"
        ),
        pytest.param(
            ["augment.scale=[0.5,0.1]"], {}, "augment.scale = [0.5, 0.1]", id="range upside down"
        ),
        pytest.param(["augment.scale=[0,1]"], {}, "expected 0 < low <= high", id="range from 0"),
        pytest.param(["augment.ratio=[2,1]"], {}, "augment.ratio = [2.0, 1.0]", id="ratio"),
        pytest.param(
            ["data.cache=gpu", "augment.policy=none"],
            {},
            "data.cache = gpu needs an NVIDIA GPU, and device is cpu: use data.cache=ram",
            id="images kept on a GPU that is not there",
        ),
        pytest.param(
            ["data.decode=gpu", "augment.policy=none"],
            {},
            "data.decode = gpu needs an NVIDIA GPU, and device is cpu: use data.decode=auto",
            id="decoding on no GPU",
        ),
        pytest.param(
            ["data.gpu_share=0.5"],
            {},
            "data.gpu_share = 0.5 is for data.decode=hybrid, and it is cpu",
            id="a share of nothing",
        ),
        pytest.param(
            ["launch.dry_run=true"], {}, "launch.dry_run = true prints a script", id="no script"
        ),
        pytest.param(
            ["schedule.milestones=[0.5,0.2]"],
            {},
            "schedule.milestones = [0.5, 0.2]: not ascending",
            id="milestones",
        ),
    ],
)
def test_refused(overrides: list[str], facts: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        plan(*overrides, **facts)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "overrides, told",
    [
        (["++model.kwargs.in_chans=1"], "model.kwargs.in_chans = 1: images have three"),
        (["++model.kwargs.drop_path_rate=0.2", "model.drop_path=0.1"],
         "model.kwargs.drop_path_rate = 0.2 with model.drop_path = 0.1: give one of them"),
        (["++optimizer.kwargs.weight_decay=0.1"], "use optimizer.weight_decay"),
        (["launch.timeout_seconds=0.5"], "launch.timeout_seconds = 0.5: at least 1"),
        (["launch.timeout_seconds=1e10"], "launch.timeout_seconds = 1e+10: at least 1, at most 10,000,000"),
        (["optimizer.lr=1e300"], "optimizer.lr = 1e+300: at most 1e+30"),
        (["++optimizer.kwargs.capturable=true"], "optimizer.kwargs.capturable = true: not within a run"),
        ([f"seed={1 << 63}"], "seed = 9223372036854775808: at most 9223372036854775807"),
    ],
)  # fmt: skip
def test_refused_to_new_runs(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError) as caught:
        check_new(configure(*overrides))
    assert told in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_what_timm_alone_can_do_is_no_mistake() -> None:
    """Some of its networks have stochastic depth unless told otherwise."""
    check_new(configure("model.drop_path=0", "++model.kwargs.drop_path_rate=0"))
    check_new(configure("model.patch_size=null", "++model.kwargs.patch_size=4"))
    check_new(configure(f"seed={(1 << 63) - 1}"))


def test_all_refusals_at_once() -> None:
    with pytest.raises(UserError) as caught:
        plan("launch.nodes=2", "strategy=single", "batch.micro=99", "stop_at=10000")
    keys = [line.split()[0] for line in str(caught.value).splitlines()]
    assert keys == ["strategy", "launch.nodes", "batch.micro", "stop_at"]


@pytest.mark.parametrize(
    "overrides, model, note",
    [
        pytest.param(["strategy=ddp", "launch.processes=2"], BATCHNORM, "set batch.micro", id="bn"),
        pytest.param(
            ["batch.global=2", "launch.processes=4"], MODEL, "2 of them", id="few samples"
        ),
        pytest.param(
            ["batch.global=20", "batch.micro=4", "launch.processes=3"],
            MODEL,
            "5 micro-batches of 4 over 3 devices: 1 of them idle in the last of 2 rounds",
            id="idle",
        ),
        pytest.param(["strategy.sync_batchnorm=true"], MODEL, "no effect", id="no BatchNorm"),
        pytest.param(["precision=fp16"], MODEL, "fp16 on a CPU", id="fp16 on the CPU"),
        pytest.param(["strategy.sync_batchnorm=true"], BATCHNORM, "no effect", id="alone"),
        pytest.param(["precision=fp16", "ema.enabled=true"], MODEL, "loss scaler", id="fp16"),
        pytest.param(["optimizer.name=AdamW8bit"], MODEL, "compiles its update", id="8 bits"),
    ],
)
def test_notes(overrides: list[str], model: ModelFacts, note: str) -> None:
    assert any(note in n for n in plan(*overrides, model=model).notes)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["strategy=ddp", "launch.processes=2"], id="no BatchNorm"),
        pytest.param(["batch.global=24", "batch.micro=4", "launch.processes=3"], id="nobody idle"),
    ],
)
def test_nothing_to_note(overrides: list[str]) -> None:
    assert plan(*overrides).notes == []


def test_fp8_is_not_for_speed() -> None:
    found = plan("precision=fp8", machine=ONE)
    assert any("it was slower than precision=bf16" in note for note in found.notes)


def test_a_key_without_effect_is_told() -> None:
    words = ["strategy=fsdp", "strategy.shard=grad_op", "strategy.wrap=model"]
    assert plan(*words, machine=EIGHT).notes == []
    (note,) = plan(*words, "strategy.prefetch=3", machine=EIGHT).notes
    assert "strategy.prefetch has no effect" in note


def test_a_format_of_gpus_is_told_on_the_cpu() -> None:
    assert plan("precision=tf32").notes == [
        "precision = tf32 is fp32 on a CPU: it is a format of GPUs"
    ]
    assert plan("precision=tf32", machine=EIGHT).notes == []
