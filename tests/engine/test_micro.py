"""``batch.micro=auto``: the largest micro-batch that every rank's device holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lockstep import worker
from lockstep.config.bind import save_config
from lockstep.config.plan import even_micro
from lockstep.config.schema import Config
from lockstep.engine.micro import fewest_rounds
from lockstep.errors import UserError
from lockstep.telemetry.compare import compare_runs
from tests.runs import configure, plan_of, train_one_rank

# --- the search -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit, slice_size, start, micro",
    [
        pytest.param(99, 64, 1, 64, id="the whole slice"),
        pytest.param(64, 64, 8, 64, id="the estimate was too careful"),
        pytest.param(20, 64, 1, 16, id="a quarter"),
        pytest.param(22, 64, 1, 22, id="a third, which halving misses"),
        pytest.param(22, 64, 3, 22, id="the estimate was right"),
        pytest.param(1, 64, 1, 1, id="one image"),
        pytest.param(3, 7, 1, 3, id="odd"),
        pytest.param(0, 64, 1, None, id="not one"),
        pytest.param(0, 1, 1, None, id="not the only one"),
    ],
)
@pytest.mark.parametrize("first", [None, 64])
def test_search(
    limit: int, slice_size: int, start: int, micro: int | None, first: int | None
) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= limit

    rounds = fewest_rounds(fits, slice_size, min(first or start, slice_size))
    assert (rounds and even_micro(slice_size, rounds)) == micro
    assert len(tried) <= 14


# --- whole runs -------------------------------------------------------------------------------

OPTIONS = ["model=vit_tiny", "+model.kwargs.depth=1", "+model.kwargs.embed_dim=24",
           "data.image_size=16", "data.num_classes=4", "data.workers=1", "device=cpu",
           "batch.global=20", "steps=4", "schedule.warmup_epochs=0", "telemetry.console=false",
           "checkpoint.every_steps=2", "checkpoint.every_epochs=null", "evaluate.every_epochs=null",
           "resume=auto"]  # fmt: skip


@contextmanager
def memory_for(images: int) -> Iterator[None]:
    """Models run out of memory with more images than this while they train."""
    build = worker.build

    def limited(*args: Any, **kwargs: Any) -> torch.nn.Module:
        def check(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            if module.training and len(given[0]) > images:
                raise torch.OutOfMemoryError("out of memory: a test's limit")

        model = build(*args, **kwargs)
        model.register_forward_pre_hook(check)
        return model

    with patch.object(worker, "build", limited):
        yield


def limited_rank(config: Config, run: Path, limits: list[int]) -> dict[str, Any] | None:
    """Train as a rank with a limit of its own."""
    with memory_for(limits[int(os.environ.get("RANK", "0"))]):
        return train_one_rank(config, plan_of(config), run)


def config_of(root: Path, *overrides: str) -> Config:
    return configure(*OPTIONS, f"data.root={root}", *overrides)


def saved_micro(run: Path) -> int:
    return int(
        json.loads((run / "checkpoints/latest/manifest.json").read_text())["meta"]["micro_batch"]
    )


PLACES = [
    pytest.param(1, "single", [7], 7, id="single"),
    pytest.param(2, "ddp", [99, 4], 4, id="ddp: the least of two ranks"),
    pytest.param(2, "fsdp", [3, 3], 3, id="fsdp"),
]


@pytest.mark.parametrize("world, strategy, limits, micro", PLACES)
def test_the_run_is_the_same(
    pool: Any, few_digits: Path, tmp_path: Path,
    world: int, strategy: str, limits: list[int], micro: int,
) -> None:  # fmt: skip
    auto = config_of(
        few_digits, f"strategy={strategy}", f"launch.processes={world}", "batch.micro=auto"
    )
    alone = config_of(few_digits, "strategy=single")
    for name, config, processes, room in (("auto", auto, world, limits), ("alone", alone, 1, [99])):
        (tmp_path / name).mkdir()
        save_config(config, tmp_path / name / "config.yaml")
        pool(processes, limited_rank, config, tmp_path / name, room)
    assert saved_micro(tmp_path / "auto") == micro
    found = compare_runs(tmp_path / "auto", tmp_path / "alone", tolerance=1e-4)
    assert found.parting is None, found.text()


def test_a_resume_keeps_it(
    few_digits: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    auto = config_of(few_digits, "strategy=single", "batch.micro=auto", "stop_at=2",
                     "telemetry.console=true")  # fmt: skip
    limited_rank(auto, run, [7])
    assert "batch.micro=auto: 7 images a forward pass, 3 times a step" in capfd.readouterr().out
    with patch.object(worker, "holds", side_effect=AssertionError("tried again")):
        limited_rank(auto.model_copy(update={"stop_at": None}), run, [99])
    assert saved_micro(run) == 7
    assert "batch.micro=auto: 7, kept from step-2" in capfd.readouterr().out


def test_not_even_one(few_digits: Path, tmp_path: Path) -> None:
    config = config_of(few_digits, "strategy=single", "batch.micro=auto")
    with pytest.raises(UserError, match="not even one image of 16 px fits cpu"):
        limited_rank(config, tmp_path, [0])
