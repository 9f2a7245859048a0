"""When two run folders are the same run, and what is said where they part."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lockstep.config.bind import save_config
from lockstep.errors import UserError
from lockstep.telemetry.compare import compare_runs, difference
from tests.runs import configure

STEPS = 4
Edit = Callable[[list[dict[str, Any]]], None]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up run folder. Do not change."""
    run = tmp_path_factory.mktemp("runs") / "example"
    run.mkdir()
    save_config(configure("strategy=single"), run / "config.yaml")
    records: list[dict[str, Any]] = [
        {
            "kind": "step", "step": step, "epoch": 1, "loss": 2.0 / step, "lr": 0.1,
            "grad_norm": 1.0, "samples_seen": 64 * step, "samples_per_second": 100.0,
            "data_wait_fraction": 0.0, "sample_digest": f"{step:04x}",
        }
        for step in range(1, STEPS + 1)
    ]  # fmt: skip
    figures = {"top1": 50.0, "top5": 90.0, "loss": 1.5, "count": 200}
    for step in (2, 4):
        records.append({"kind": "eval", "step": step, "weights": "raw"} | figures)
    write(run, records)
    save_file({"a": torch.ones(3), "count": torch.tensor(5)}, run / "model.safetensors")
    return run


def write(run: Path, records: list[dict[str, Any]]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (run / "metrics.jsonl").write_text("".join(lines))


def edited(example: Path, tmp_path: Path, edit: Edit) -> Path:
    run = shutil.copytree(example, tmp_path / "edited")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    edit(records)
    write(run, records)
    return run


def scale(index: int, key: str, factor: float) -> Edit:
    return lambda records: records[index].update({key: records[index][key] * factor})


def put(index: int, **values: Any) -> Edit:
    return lambda records: records[index].update(values)


@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda records: None, id="nothing"),
        pytest.param(scale(2, "loss", 1 + 5e-5), id="loss within tolerance"),
        pytest.param(scale(2, "samples_per_second", 3.0), id="speed"),
        pytest.param(put(2, data_wait_fraction=0.9), id="waiting"),
        pytest.param(put(4, top1=50.5), id="one sample of 200"),
        pytest.param(lambda records: records.pop(4), id="evaluated less often"),
        pytest.param(lambda records: records.reverse(), id="another order of lines"),
    ],
)
def test_same(example: Path, tmp_path: Path, edit: Edit) -> None:
    other = edited(example, tmp_path, edit)
    for a, b in ((example, other), (other, example)):
        found = compare_runs(a, b, tolerance=1e-4)
        assert found.parting is None and found.num_steps == STEPS
        assert found.text().startswith("same run: 4 steps, largest relative loss difference ")


@pytest.mark.parametrize(
    ("edit", "agreed", "parting"),
    [
        pytest.param(scale(2, "loss", 1.01), 2, "step 3: loss 0.66", id="loss"),
        pytest.param(scale(0, "grad_norm", 1.01), 0, "step 1: grad_norm 1.0 and 1.01", id="norm"),
        pytest.param(put(1, loss=None), 1, "step 2: loss 1.0 and None", id="not finite"),
        pytest.param(put(3, lr=0.2), 3, "step 4: lr 0.1 and 0.2", id="learning rate"),
        pytest.param(
            put(1, sample_digest="f", loss=9.0), 1, "step 2: sample_digest 0002 and f", id="samples"
        ),
        pytest.param(put(1, samples_seen=1), 1, "step 2: samples_seen 128 and 1", id="seen"),
        pytest.param(lambda r: r.pop(3), 3, "step 4 is in", id="one step less"),
        pytest.param(put(4, count=199), 2, "step 2: evaluation of the raw weights: count", id="n"),
        pytest.param(
            put(5, top1=51.0), 4, "step 4: evaluation of the raw weights: top1", id="top1"
        ),
        pytest.param(
            put(5, top5=80.0), 4, "step 4: evaluation of the raw weights: top5", id="top5"
        ),
        pytest.param(put(4, loss=1.6), 2, "step 2: evaluation of the raw weights: loss", id="eval"),
    ],
)
def test_different(example: Path, tmp_path: Path, edit: Edit, agreed: int, parting: str) -> None:
    found = compare_runs(example, edited(example, tmp_path, edit), tolerance=1e-4)
    assert found.parting is not None and found.parting.startswith(parting)
    assert found.num_steps == agreed
    assert found.text().startswith(f"different runs: {parting}")
    told = found.text().endswith("grows as training goes on")
    assert told == (not parting.endswith(("0002 and f", "128 and 1", "is in")))


def test_tolerance_of_nothing(example: Path, tmp_path: Path) -> None:
    other = edited(example, tmp_path, scale(2, "loss", 1 + 1e-15))
    assert compare_runs(example, example, tolerance=0).parting is None
    assert compare_runs(example, other, tolerance=1e-14).parting is None
    assert "loss" in str(compare_runs(example, other, tolerance=0).parting)
    verdict = edited(example, tmp_path / "verdict", put(4, top1=50.5))
    assert "top1" in str(compare_runs(example, verdict, tolerance=0).parting)


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        pytest.param(["strategy=fsdp", "launch.processes=2", "device=cpu"], [], id="no law"),
        pytest.param(
            ["seed=1", "optimizer.lr=0.5"], ["  optimizer.lr: 0.001 and 0.5", "  seed: 0 and 1"],
            id="law",
        ),
        pytest.param(["++model.kwargs.depth=2"], ["  model.kwargs.depth: (absent) and 2"], id="key"),
    ],
)  # fmt: skip
def test_configurations(
    example: Path, tmp_path: Path, overrides: list[str], lines: list[str]
) -> None:
    other = shutil.copytree(example, tmp_path / "other")
    save_config(configure(*overrides), other / "config.yaml")
    parting = compare_runs(example, other, tolerance=1e-4).parting
    assert parting == ("\n".join(["their configurations:", *lines]) if lines else None)


@pytest.mark.parametrize(
    ("weights", "parting"),
    [
        pytest.param({"a": torch.ones(3) + 1e-5, "count": torch.tensor(9)}, None, id="close"),
        pytest.param({"a": torch.tensor([1.0, 1.0, 0.0]), "count": torch.tensor(5)},
                     "final weights differ by 0.58 of their norm", id="far"),
        pytest.param({"a": torch.full((3,), torch.nan), "count": torch.tensor(5)},
                     "final weights differ by nan", id="nan"),
        pytest.param({"a": torch.ones(2), "count": torch.tensor(5)},
                     "final weights: a is [3] and [2]", id="shape"),
        pytest.param({"a": torch.ones(3)}, "final weights: only one of them has count", id="name"),
        pytest.param(None, None, id="not finished"),
    ],
)  # fmt: skip
def test_weights(
    example: Path, tmp_path: Path, weights: dict[str, torch.Tensor] | None, parting: str | None
) -> None:
    other = shutil.copytree(example, tmp_path / "other")
    (other / "model.safetensors").unlink()
    if weights is not None:
        save_file(weights, other / "model.safetensors")
    found = compare_runs(example, other, tolerance=1e-4).parting
    assert found is None if parting is None else str(found).startswith(parting)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(shutil.rmtree, "no such folder", id="no folder"),
        pytest.param(lambda run: (run / "config.yaml").unlink(), "no config.yaml", id="no config"),
        pytest.param(
            lambda run: (run / "config.yaml").write_text("{"), "config.yaml", id="no YAML"
        ),
        pytest.param(
            lambda run: (run / "metrics.jsonl").unlink(), "no metrics.jsonl", id="no file"
        ),
        pytest.param(lambda run: write(run, []), "no steps", id="no steps"),
        pytest.param(
            lambda run: (run / "model.safetensors").write_bytes(b"1"), "be read", id="bad weights"
        ),
    ],
)
def test_not_comparable(
    example: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    other = shutil.copytree(example, tmp_path / "other")
    damage(other)
    with pytest.raises(UserError, match=message):
        compare_runs(example, other, tolerance=1e-4)


def test_difference() -> None:
    assert difference(1.0, 1.0) == difference(0.0, 0.0) == difference(None, None) == 0.0
    assert difference(2.0, 1.0) == difference(1.0, 2.0) == difference(-2.0, -1.0) == 0.5
    assert difference(0.0, 1e-9) == 1.0
    assert difference(None, 1.0) == difference(1.0, None) == float("inf")
