"""What is compiled, recorded, and sent when; and what is against it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lockstep.config.plan import Machine, ModelFacts
from lockstep.errors import UserError
from tests.config.facts import BATCHNORM, CPU, EIGHT, MODEL, ONE, gpus, plan


@pytest.mark.parametrize(
    ("overrides", "facts", "expected"),
    [
        pytest.param(["steps=5000"], {}, "off", id="CPU"),
        pytest.param(["steps=5000"], {"machine": ONE}, "graphs", id="one GPU"),
        pytest.param(["steps=5000"], {"machine": EIGHT}, "default", id="several"),
        pytest.param(["steps=5000", "strategy=fsdp"], {"machine": EIGHT}, "default", id="fsdp"),
        pytest.param(["steps=5000", "strategy=dp"], {"machine": EIGHT}, "off", id="dp"),
        pytest.param(["steps=999"], {"machine": ONE}, "off", id="too short to earn it"),
        pytest.param(["steps=9", "precision=fp8"], {"machine": ONE}, "graphs", id="8 bits need it"),
        pytest.param(
            ["steps=5000", "model.activation_checkpointing=true"],
            {"machine": ONE},
            "default",
            id="recomputing is not recorded",
        ),
        pytest.param(
            ["steps=5000", "model.activation_checkpointing=true"],
            {"machine": ONE, "model": BATCHNORM},
            "off",
            id="recomputing BatchNorm",
        ),
        pytest.param(
            ["steps=5000", "batch.global=60000"],
            {"machine": ONE},
            "default",
            id="no room for a recorded pass and another",
        ),
        pytest.param(
            ["steps=5000"], {"machine": replace(ONE, compiles=False)}, "off", id="no C compiler"
        ),
        pytest.param(["steps=9", "compile=max"], {"machine": EIGHT}, "max", id="as told"),
    ],
)
def test_compile(overrides: list[str], facts: dict[str, Any], expected: str) -> None:
    assert plan("compile=auto", *overrides, **facts).compile == expected


FSDP = "strategy=fsdp"
EVENLY = "a batch.global that micro-batches of all processes share evenly"


@pytest.mark.parametrize(
    ("overrides", "model", "instead"),
    [
        pytest.param(
            ["strategy=ddp", "strategy.reduce=backward"],
            *(MODEL, "strategy.reduce=after"),
            id="gradients sent in a pass",
        ),
        pytest.param(
            ["strategy=ddp", "strategy.sync_batchnorm=true"],
            *(BATCHNORM, "strategy.sync_batchnorm=false"),
            id="statistics sent in a pass",
        ),
        pytest.param(["strategy=hsdp"], MODEL, "strategy=ddp", id="sent in two ways"),
        pytest.param(
            [FSDP, "strategy.cpu_offload=true"],
            *(MODEL, "strategy.cpu_offload=false"),
            id="offloaded parameters",
        ),
        pytest.param([FSDP, "batch.global=100"], MODEL, EVENLY, id="uneven parts of a step"),
        pytest.param(
            [FSDP, "strategy.shard=grad_op", "batch.global=64", "batch.micro=4"],
            *(MODEL, "strategy.shard=full"),
            id="gradients kept over passes",
        ),
        pytest.param(
            [FSDP, "launch.nodes=1:4", "launch.rendezvous=a:1"],
            *(MODEL, "a fixed launch.nodes"),
            id="a step that other nodes share otherwise",
        ),
    ],
)
def test_what_keeps_a_pass_from_being_recorded(
    overrides: list[str], model: ModelFacts, instead: str
) -> None:
    message = f"cannot be recorded with these settings; use {instead}, or compile=default"
    with pytest.raises(UserError) as caught:
        plan("compile=graphs", *overrides, machine=EIGHT, model=model)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "machine", "compiles", "reduces", "records"),
    [
        pytest.param([], gpus(8, 80), "graphs", "after", True, id="NVLink"),
        pytest.param([], gpus(8, 80, nvlink=False), "default", "backward", False, id="no NVLink"),
        pytest.param(
            ["launch.nodes=2", "launch.rendezvous=a:1"],
            gpus(8, 80),
            "default",
            "backward",
            False,
            id="two nodes",
        ),
        pytest.param(["compile=off"], gpus(8, 80), "off", "backward", False, id="not compiled"),
        pytest.param(
            ["compile=off", "deterministic=true"],
            *(gpus(8, 80, nvlink=False), "off", "after", False),
            id="bit for bit",
        ),
        pytest.param(["compile=graphs"], gpus(8, 80), "graphs", "after", True, id="recorded"),
        pytest.param(
            ["compile=default", "strategy.reduce=after"],
            *(gpus(8, 80), "default", "after", False),
            id="whole",
        ),
        pytest.param(["strategy.reduce=after"], gpus(8, 80), "graphs", "after", True, id="after"),
        pytest.param(
            ["compile=off", "strategy.reduce=after"], CPU, "off", "after", False, id="CPU"
        ),
        pytest.param(
            ["strategy.reduce=backward"], gpus(8, 80), "default", "backward", False, id="as told"
        ),
        pytest.param(
            ["strategy.sync_batchnorm=true", "strategy.reduce=after"],
            *(gpus(8, 80), "graphs", "after", True),
            id="no statistics to be sent",
        ),
        pytest.param(["strategy=fsdp"], gpus(8, 80), "default", "backward", False, id="fsdp"),
        pytest.param(
            ["strategy=fsdp", "compile=graphs"],
            *(gpus(8, 80), "graphs", "backward", True),
            id="recorded fsdp",
        ),
        pytest.param(
            [
                *("strategy=fsdp", "compile=graphs"),
                "strategy.shard=full",
                "batch.global=64",
                "batch.micro=8",
            ],
            *(gpus(8, 80), "graphs", "backward", True),
            id="recorded fsdp, several micro-batches",
        ),
        pytest.param(
            ["strategy=fsdp", "compile=max"],
            *(gpus(8, 80), "max", "backward", False),
            id="kernels by trial alone",
        ),
        pytest.param(
            [
                *("strategy=fsdp", "compile=graphs", "launch.processes=1"),
                "batch.global=100",
                "batch.micro=32",
            ],
            *(gpus(8, 80), "graphs", "backward", True),
            id="nobody to be uneven with",
        ),
    ],
)
def test_reduce(
    overrides: list[str], machine: Machine, compiles: str, reduces: str, records: bool
) -> None:
    words = ["strategy=ddp", "launch.processes=2", "steps=5000", "compile=auto", *overrides]
    found = plan(*words, machine=machine)
    assert (found.compile, found.reduce, found.records) == (compiles, reduces, records)


def test_where_gradients_are_sent_is_told() -> None:
    words = ["strategy=ddp", "compile=default"]
    assert "strategy.reduce=after" in plan(*words, machine=gpus(8, 80)).text()
    assert "strategy.reduce" not in plan(*words, machine=gpus(8, 80, nvlink=False)).text()
