"""The lockstep law: the same run whichever strategy, number of processes or interruption.

The training is real (images, augmentation, gloo, checkpoints), only small. Every run is compared
with one process that was never interrupted.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.schema import Config
from tests.runs import configure, plan_of, records, train_one_rank

TRAIN, VAL = 47, 23
BASE = [
    "data.image_size=16",
    "data.num_classes=4",
    "data.workers=1",
    "device=cpu",
    "batch.global=20",  # over three processes: slices that differ; 47 images: a last step of 7
    "epochs=3",
    "schedule.warmup_epochs=1",
    "ema.enabled=true",
    "ema.decay=0.9",
    "checkpoint.every_epochs=null",
    "telemetry.console=false",
]
MODELS = {
    "vit": [
        *("model=vit_tiny", "+model.kwargs.depth=2", "+model.kwargs.embed_dim=48"),
        *("model.drop_path=0.2", "augment=strong", "optimizer.lr=0.003"),
    ],
    "resnet": [
        *("model=timm", "model.name=test_resnet", "model.drop_path=0.2", "augment=strong"),
        *("optimizer=sgd", "optimizer.base_batch=null", "optimizer.lr=0.005"),
    ],
}
SHARED = {
    "dp": (1, ["strategy=dp"]),
    "ddp2": (2, ["strategy=ddp"]),
    "ddp3": (3, ["strategy=ddp"]),
    "fsdp2 full": (2, ["strategy=fsdp"]),
    "fsdp2 grad_op": (2, ["strategy=fsdp", "strategy.shard=grad_op"]),
    "fsdp2 none": (2, ["strategy=fsdp", "strategy.shard=none"]),
    "fsdp3 offload": (3, ["strategy=fsdp", "strategy.cpu_offload=true"]),
    "hsdp 2x2": (4, ["strategy=hsdp", "strategy.shard_processes=2"]),
}
MICRO = "batch.micro=7"  # 20 = 7 + 7 + 6: with two or four processes, some idle in the last round
EXACT = 1e-4
"""Relative; float32 sums in another order differ by about 1e-7 a step.

Small batches of BatchNorm amplify that a hundredfold a step, even between two runs of one process
whose first weights differ by 1e-7: hence seven images, not four, and a gentle learning rate.
"""


class Trainer:
    """Trains configurations in turn on a pool of processes; each run in a folder of its own."""

    def __init__(self, pool: Any, data: Path, folder: Path) -> None:
        self._pool = pool
        self._data = data
        self._folder = folder
        self._summaries: dict[str, list[Any]] = {}

    def configure(self, processes: int, *overrides: str) -> Config:
        place = [f"data.root={self._data}", f"launch.processes={processes}"]
        return configure(*BASE, *place, *overrides)

    def __call__(self, name: str, processes: int, *overrides: str) -> Path:
        """Train unless this test module has done so; returns the run folder."""
        if name not in self._summaries:
            self._summaries[name] = self.start(name, processes, *overrides)
        return self._folder / name

    def start(self, name: str, processes: int, *overrides: str) -> list[Any]:
        config = self.configure(processes, *overrides)
        return self._pool(processes, train_one_rank, config, plan_of(config), self._folder / name)


@pytest.fixture(scope="module")
def trained(pool: Any, few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(pool, few_digits, tmp_path_factory.mktemp("runs"))


def reference(trained: Trainer, model: str, *overrides: str) -> Path:
    name = "-".join([model, "single", *overrides])
    return trained(name, 1, *MODELS[model], "strategy=single", *overrides)


def check_same_run(run: Path, other: Path, tolerance: float = EXACT) -> None:
    steps, expected = records(run, "step"), records(other, "step")
    for key in ("step", "epoch", "lr", "samples_seen", "sample_digest"):
        assert [s[key] for s in steps] == [s[key] for s in expected], key
    for key in ("loss", "grad_norm"):
        assert [s[key] for s in steps] == pytest.approx(
            [s[key] for s in expected], rel=tolerance
        ), key
    evaluations, expected = records(run, "eval"), records(other, "eval")
    for key in ("step", "weights", "count", "top1", "top5"):
        assert [e[key] for e in evaluations] == [e[key] for e in expected], key
    assert [e["loss"] for e in evaluations] == pytest.approx(
        [e["loss"] for e in expected], rel=tolerance
    )
    weights, expected = (load_file(r / "model.safetensors") for r in (run, other))
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-4)


def test_the_reference_trains(trained: Trainer) -> None:
    run = reference(trained, "vit", MICRO)
    steps = records(run, "step")
    assert [s["samples_seen"] for s in steps] == [20, 40, 47, 67, 87, 94, 114, 134, 141]
    assert len({s["sample_digest"] for s in steps}) == len(steps)
    assert {e["count"] for e in records(run, "eval")} == {VAL}
    assert [e["weights"] for e in records(run, "eval")] == ["raw", "ema"] * 3
    options = [*MODELS["vit"], "augment=none", "model.drop_path=0", "evaluate.every_epochs=null"]
    quiet = trained("quiet", 1, *options, "epochs=30")
    losses = [s["loss"] for s in records(quiet, "step")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shared", SHARED)
def test_same_run(trained: Trainer, shared: str, model: str) -> None:
    """With batch.micro fixed, models with BatchNorm included."""
    processes, strategy = SHARED[shared]
    run = trained(f"{model}-{shared}", processes, *MODELS[model], *strategy, MICRO)
    check_same_run(run, reference(trained, model, MICRO))


@pytest.mark.parametrize("shared", ["ddp3", "fsdp2 full", "hsdp 2x2"])
def test_same_run_whatever_the_slices(trained: Trainer, shared: str) -> None:
    """Without BatchNorm, the sizes of the forward passes change nothing."""
    processes, strategy = SHARED[shared]
    run = trained(f"slices-{shared}", processes, *MODELS["vit"], *strategy)
    check_same_run(run, reference(trained, "vit", MICRO))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(["model.activation_checkpointing=true"], id="checkpointing"),
        pytest.param(["strategy.meta_init=true"], id="meta init"),
        pytest.param(["strategy.prefetch=2"], id="prefetch"),
        pytest.param(["optimizer.clip_grad_norm=0.1"], id="clipping"),
        pytest.param(["evaluate.batch=3"], id="small evaluation batches"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_same_run_with(trained: Trainer, model: str, change: list[str]) -> None:
    law = [c for c in change if c.startswith("optimizer.")]
    name = f"{model}-{'-'.join(change)}"
    run = trained(name, 2, *MODELS[model], "strategy=fsdp", MICRO, *change)
    check_same_run(run, reference(trained, model, MICRO, *law))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "shared, precision",
    [
        *[(shared, "bf16") for shared in ("dp", "ddp2", "fsdp2 full")],
        ("fsdp2 full", "fp16"),
    ],
)
def test_half_precision_trains(trained: Trainer, shared: str, model: str, precision: str) -> None:
    processes, strategy = SHARED[shared]
    half = [f"precision={precision}", "precision.initial_scale=1024", "steps=3", MICRO]
    run = trained(f"{model}-{shared}-{precision}", processes, *MODELS[model], *strategy, *half)
    losses = [s["loss"] for s in records(run, "step")]
    expected = [s["loss"] for s in records(reference(trained, model, MICRO), "step")]
    assert losses == pytest.approx(expected[:3], rel=0.05)
    assert all(math.isfinite(s["grad_norm"]) for s in records(run, "step"))


# --- interruptions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model, first, then",
    [
        pytest.param("vit", "single", "fsdp2 full", id="vit single to fsdp"),
        pytest.param("vit", "fsdp2 full", "ddp3", id="vit fsdp to ddp"),
        pytest.param("resnet", "ddp3", "hsdp 2x2", id="resnet ddp to hsdp"),
        pytest.param("resnet", "hsdp 2x2", "single", id="resnet hsdp to single"),
    ],
)
def test_interrupted_run(trained: Trainer, model: str, first: str, then: str) -> None:
    """Stopped in mid-epoch, and gone on with by another strategy on other processes."""
    shared = SHARED | {"single": (1, ["strategy=single"])}
    name = f"{model}-{first}-then-{then}"
    processes, strategy = shared[first]
    options = [*MODELS[model], MICRO]
    stopped = trained.start(name, processes, *options, *strategy, "stop_at=4")
    assert stopped == [None] * processes
    processes, strategy = shared[then]
    run = trained(name, processes, *options, *strategy)
    check_same_run(run, reference(trained, model, MICRO))


@pytest.mark.parametrize(
    "name", ["lamb", "adafactor", "adamp", "lion", "adagrad", "asgd", "madgrad"]
)
def test_interrupted_run_of_any_optimizer(trained: Trainer, name: str) -> None:
    """Whatever an optimiser remembers, step counts that are no tensors included."""
    options = [*MODELS["vit"], "strategy=single", f"optimizer.name={name}", "steps=5"]
    options += ["~optimizer.kwargs.betas"]
    whole = trained(f"{name}-whole", 1, *options)
    trained.start(f"{name}-parts", 1, *options, "stop_at=3")
    check_same_run(trained(f"{name}-parts", 1, *options), whole, tolerance=1e-6)


def test_a_killed_export_is_made_up_for(trained: Trainer, tmp_path: Path) -> None:
    """After the last step, but before DONE: the next start trains nothing and ends the run."""
    whole = reference(trained, "resnet", MICRO)
    torn = tmp_path / "torn"
    shutil.copytree(whole, torn)
    for name in ("DONE", "model.safetensors"):
        (torn / name).unlink()
    summary = trained.start(str(torn), 1, *MODELS["resnet"], "strategy=single", MICRO)
    assert summary[0]["step"] == 9
    check_same_run(torn, whole)
    assert (torn / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


# --- through the door -------------------------------------------------------------------------

Train = Callable[..., Any]


@pytest.fixture
def door(train: Train, few_digits: Path) -> Train:
    options = [*BASE, *MODELS["vit"], MICRO, f"data.root={few_digits}", "run.name=run"]
    return partial(train, *options)


def test_the_command_trains_stops_goes_on_and_ends(
    trained: Trainer, door: Train, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    first = door("strategy=ddp", "launch.processes=2", "stop_at=3")
    assert first.returncode == 85, first.stderr
    then = door("strategy=fsdp", "launch.processes=2")
    assert then.returncode == 0, then.stderr
    check_same_run(run, reference(trained, "vit", MICRO))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = door()
    assert again.returncode == 0, again.stderr
    assert "already finished" in again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_unreadable_images_are_counted(trained: Trainer, few_digits: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(few_digits, root)
    for path in [*sorted(root.glob("train/*/*"))[5::20], *sorted(root.glob("val/*/*"))[3:4]]:
        path.write_bytes(b"no image")
    options = [*MODELS["vit"], f"data.root={root}", "data.on_error=skip", "epochs=1"]
    run = tmp_path / "run"
    summaries = trained.start(str(run), 2, *options, "strategy=ddp", MICRO)
    assert {e["count"] for e in records(run, "eval")} == {VAL - 1}
    for summary in summaries:
        assert {split: len(names) for split, names in summary["left_out"].items()} == {
            "train": 3,
            "val": 1,
        }
    assert all(math.isfinite(s["loss"]) for s in records(run, "step"))
    alone = tmp_path / "alone"
    trained.start(str(alone), 1, *options, "strategy=single", MICRO)
    check_same_run(run, alone)
