"""Weights that are read back give the figures that training told, wherever they are read from."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint.export import read_card
from lockstep.errors import UserError
from lockstep.evaluation import Wanted, evaluate_weights, export, read_weights
from lockstep.launch import launch
from lockstep.strategy import precision
from tests.runs import configure, records, write_few_digits

TINY = ("device=cpu", "strategy=single", "batch.global=16", "batch.micro=8", "steps=3")
EVERY_STEP = ("evaluate.every_steps=1", "checkpoint.every_steps=1", "checkpoint.keep_last=9")
SMALL_VIT = ("++model.kwargs={depth: 2, embed_dim: 32, num_heads: 2}",)
RUNS = {
    "vit, ema": (*SMALL_VIT, "ema.enabled=true", "ema.warmup=true"),
    "vit, bf16": (*SMALL_VIT, "precision=bf16"),
    "resnet": ("model=timm", "model.name=test_resnet", "optimizer.lr=0.01"),
    "resnet, ema": ("model=timm", "model.name=test_resnet", "ema.enabled=true"),
}


def figures(run: Path, step: int, kind: str) -> dict[str, Any]:
    """What training told."""
    (found,) = (r for r in records(run, "eval") if (r["step"], r["weights"]) == (step, kind))
    return {key: found[key] for key in ("top1", "top5", "loss", "count")}


def evaluated(where: Path, wanted: Wanted = "auto") -> dict[str, Any]:
    done = evaluate_weights(read_weights(where, wanted), root=None, batch=None, device="cpu")
    assert done.notes == [] and done.num_left_out == 0
    return asdict(done.result)


def finished(root: Path, data: Path, *overrides: str) -> Path:
    here = (f"data.root={data}", "data.num_classes=null", f"run.root={root}")
    assert launch(configure(*TINY, *EVERY_STEP, *here, *overrides), "example") == 0
    return root / "example"


@pytest.fixture(scope="module", params=RUNS.values(), ids=RUNS.keys())
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, few_digits: Path
) -> Path:
    """A finished run of three steps. Do not change."""
    return finished(tmp_path_factory.mktemp("runs"), few_digits, *request.param)


@pytest.fixture(scope="module")
def ema_run(tmp_path_factory: pytest.TempPathFactory, few_digits: Path) -> Path:
    """A finished run with averaged weights. Do not change."""
    return finished(tmp_path_factory.mktemp("runs"), few_digits, *RUNS["vit, ema"])


def test_as_training_told(run: Path) -> None:
    told = json.loads((run / "DONE").read_text())
    last = figures(run, 3, told["weights"])
    assert {key: told[key] for key in last} == last
    assert evaluated(run) == last
    assert evaluated(run / "checkpoints") == last
    assert evaluated(run / "model.safetensors") == evaluated(run / "model.json") == last
    assert evaluated(run / "checkpoints/step-2") == figures(run, 2, told["weights"])
    assert evaluated(run, "raw") == figures(run, 3, "raw")


def test_export_of_the_last_step_is_the_runs_own(run: Path, tmp_path: Path) -> None:
    own, again = run / "model.safetensors", tmp_path / "again.safetensors"
    export(read_weights(run, "auto"), again)
    mine, theirs = read_weights(again, "auto"), read_weights(own, "auto")
    assert mine.state.keys() == theirs.state.keys()
    for name, tensor in theirs.state.items():
        if tensor.is_floating_point():  # BatchNorm's counter is a mere record
            assert torch.equal(mine.state[name], tensor), name
    for key in ("recipe", "num_classes", "image_size", "data", "versions"):
        assert mine.card[key] == theirs.card[key], key
    assert read_card(again).keys() == read_card(own).keys()
    figures = {k: v for k, v in theirs.card["metrics"].items() if k not in ("run", "left_out")}
    assert figures.items() <= mine.card["metrics"].items()


def test_export_of_an_earlier_step(ema_run: Path, tmp_path: Path) -> None:
    to = tmp_path / "new/early.safetensors"
    export(read_weights(ema_run / "checkpoints/step-1", "raw"), to)
    assert evaluated(to) == figures(ema_run, 1, "raw")
    metrics = read_card(to)["metrics"]
    assert (metrics["step"], metrics["weights"]) == (1, "raw")
    assert metrics["top1"] == figures(ema_run, 1, "raw")["top1"]


def test_a_step_without_evaluation_has_no_figures(ema_run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(ema_run, tmp_path / "moved")
    (moved / "metrics.jsonl").unlink()
    metrics = read_weights(moved, "auto").card["metrics"]
    assert metrics["step"] == 3 and "top1" not in metrics


def test_a_damaged_checkpoint_is_passed_over(ema_run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(ema_run, tmp_path / "moved")
    (moved / "checkpoints/step-3/COMMITTED").unlink()
    weights = read_weights(moved, "auto")
    assert weights.step == 2 and "step-3: COMMITTED is missing" in weights.notes[0]


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_batch_changes_nothing(ema_run: Path, batch: int) -> None:
    done = evaluate_weights(read_weights(ema_run, "ema"), root=None, batch=batch, device="cpu")
    told = figures(ema_run, 3, "ema")
    assert (done.result.top1, done.result.count) == (told["top1"], told["count"])
    assert done.result.loss == pytest.approx(told["loss"], rel=1e-6)


def test_other_images(ema_run: Path, tmp_path: Path) -> None:
    root = write_few_digits(tmp_path, train=0, val=12, classes=4)
    weights = read_weights(ema_run / "model.safetensors", "auto")
    done = evaluate_weights(weights, root=root, batch=None, device="auto")
    assert done.result.count == 12
    assert done.notes == [f"note: {root}/val holds other images than training evaluated"]


def test_8_bits_that_are_not_here(ema_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_FP8_WIDTH", 16)
    weights = read_weights(ema_run, "auto")
    in_8_bits = weights.config.precision.model_copy(update={"name": "fp8"})
    changed = replace(weights, config=weights.config.model_copy(update={"precision": in_8_bits}))
    done = evaluate_weights(changed, root=None, batch=None, device="cpu")
    (note,) = done.notes
    assert note == (
        "the run computed in 8 bits, and this evaluation in 16 (precision = fp8 needs a GPU of "
        "compute capability 8.9 or newer, and this is a cpu): figures differ a little"
    )


@pytest.mark.parametrize("where", ["model.safetensors", "checkpoints/step-3"])
def test_other_classes(ema_run: Path, tmp_path: Path, where: str) -> None:
    root = write_few_digits(tmp_path, train=0, val=30, classes=5)
    weights = read_weights(ema_run / where, "auto")
    with pytest.raises(UserError, match="class folders"):
        evaluate_weights(weights, root=root, batch=None, device="cpu")


def test_weights_of_another_model(ema_run: Path) -> None:
    weights = read_weights(ema_run, "auto")
    weights.state.pop("cls_token")
    with pytest.raises(UserError, match=r"do not fit vit_tiny.*cls_token"):
        evaluate_weights(weights, root=None, batch=None, device="cpu")


@pytest.mark.parametrize(
    ("where", "wanted", "message"),
    [
        pytest.param("gone", "auto", "no such folder", id="nothing"),
        pytest.param("checkpoints/step-9", "auto", "no such folder", id="no step"),
        pytest.param("metrics.jsonl", "auto", "give a run folder", id="other file"),
        pytest.param("plan.json", "auto", "not a card", id="other JSON"),
        pytest.param("model.safetensors", "raw", "holds the ema weights alone", id="not exported"),
    ],
)
def test_refusals(ema_run: Path, where: str, wanted: Wanted, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_weights(ema_run / where, wanted)


def test_no_average(tmp_path: Path, few_digits: Path) -> None:
    run = finished(tmp_path, few_digits, *SMALL_VIT)
    for where in (run, run / "model.safetensors"):
        with pytest.raises(UserError, match="--weights ema"):
            read_weights(where, "ema")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        pytest.param("config.yaml", None, "config.yaml", id="no configuration"),
        pytest.param("plan.json", None, "not the plan of a run", id="no plan"),
        pytest.param("plan.json", "{", "not the plan of a run", id="torn plan"),
        pytest.param("model.json", "{}", "not a card", id="empty card"),
        pytest.param("model.safetensors", "x", "not the weights", id="other weights"),
    ],
)
def test_damaged_folder(
    ema_run: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    moved = shutil.copytree(ema_run, tmp_path / "moved")
    (moved / name).unlink()
    if text is not None:
        (moved / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_weights(moved / name if name.startswith("model.") else moved, "auto")


def test_the_file_that_is_named_is_read(ema_run: Path, tmp_path: Path) -> None:
    """Its card names another of the same folder."""
    moved = shutil.copytree(ema_run, tmp_path / "moved")
    for ending in (".safetensors", ".json"):
        shutil.copy(moved / f"model{ending}", moved / f"copy{ending}")
    assert evaluated(moved / "copy.safetensors") == evaluated(moved / "model.safetensors")
    (moved / "copy.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"copy\.safetensors: not the weights"):
        read_weights(moved / "copy.safetensors", "auto")
    with pytest.raises(UserError, match=r"gone\.safetensors: no such file"):
        read_weights(moved / "gone.safetensors", "auto")


def test_what_is_refused_to_new_runs_alone_is_read(ema_run: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(ema_run, tmp_path / "moved")
    text = (moved / "config.yaml").read_text()
    text = re.sub("timeout_seconds: .*", "timeout_seconds: 0.5", text)
    (moved / "config.yaml").write_text(text)
    assert evaluated(moved) == evaluated(ema_run)


def test_export_refuses(ema_run: Path, tmp_path: Path) -> None:
    weights = read_weights(ema_run, "auto")
    with pytest.raises(UserError, match=r"must end in \.safetensors"):
        export(weights, tmp_path / "weights.bin")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make its folder"):
        export(weights, tmp_path / "file/weights.safetensors")
