"""Interrupted runs: stopped anywhere, gone on with anywhere, the same as one never interrupted.

What dies without being asked is in the drill.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lockstep.checkpoint.manifest import read_manifest
from lockstep.telemetry.phases import read_phases
from tests.law import (
    BASE,
    CHAINS,
    LONG,
    MODELS,
    PLACES,
    Chain,
    Trainer,
    check_same_run,
    write_data,
)
from tests.runs import records


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def trained(pool: Any, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(pool, data, tmp_path_factory.mktemp("runs"))


def summary(run: Path) -> dict[str, Any]:
    """Of a finished run, without its place."""
    done: dict[str, Any] = json.loads((run / "DONE").read_text())
    del done["run"]
    return done


def newest(run: Path) -> int:
    """The step of the newest checkpoint."""
    return max(int(path.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*"))


# --- stopped after a step ---------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS, ids=[chain.name for chain in CHAINS])
def test_chain(trained: Trainer, chain: Chain) -> None:
    """Each time another strategy on another number of processes goes on, in mid-epoch."""
    run = trained.chain(chain)
    reference = trained.reference(chain.model, *LONG)
    check_same_run(run, reference)
    figures = ("step", "count", "weights", "best_step")
    assert {k: summary(run)[k] for k in figures} == {k: summary(reference)[k] for k in figures}
    assert summary(run)["best_top1"] == pytest.approx(summary(reference)["best_top1"])


REMEMBERED = {
    "dropout": ["+model.kwargs.proj_drop_rate=0.2"],
    "loss scale": ["precision=fp16", "precision.initial_scale=1024", "precision.growth_interval=2"],
    "best of raw weights": ["ema.enabled=false", "evaluate.every_epochs=1"],
    **{
        name: [f"optimizer.name={name}", "~optimizer.kwargs.betas"]
        for name in ("lamb", "adafactor", "adamp", "lion", "adagrad", "asgd", "madgrad")
    },
}


@pytest.mark.parametrize("options", REMEMBERED.values(), ids=REMEMBERED)
def test_whatever_a_run_remembers(trained: Trainer, options: list[str]) -> None:
    """On one process to the bit; step counts of optimisers that are no tensors included."""
    options = ["strategy=single", "batch.micro=25", *options]
    whole = trained.reference("vit", *options)
    name = f"{whole.name} in parts"
    trained.start(name, 1, *MODELS["vit"], *options, "stop_at=3")
    parts = trained(name, 1, *MODELS["vit"], *options)
    check_same_run(parts, whole, tolerance=0)
    assert summary(parts) == summary(whole)
    plain = [read_manifest(run / "checkpoints/step-4").meta for run in (parts, whole)]
    for key in ("progress", "scaler", "optimizer"):
        assert plain[0][key] == plain[1][key], key


def test_wandb_goes_on_in_one_run(trained: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    options = [*MODELS["vit"], "telemetry.wandb=true", "telemetry.wandb_mode=offline"]
    trained.start("wandb", 2, *options, "strategy=ddp", "stop_at=1")
    run_id = (trained.folder / "wandb/wandb-id").read_text()
    run = trained("wandb", 1, *options, "strategy=single")
    check_same_run(run, trained.reference("vit"))
    parts = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert [part.name for part in parts] == [f"run-{run_id}.wandb"] * 2
    assert all(b"train/loss" in part.read_bytes() for part in parts)


# --- asked to stop by a signal, anywhere ------------------------------------------------------


@dataclass
class Asked:
    """A request to stop that reaches one rank alone, when it is in ``phase`` after ``step``."""

    run_dir: Path
    rank: int
    phase: str
    step: int
    times: int = 1
    """How often it is asked there before it answers."""
    regroup: bool = False

    @property
    def requested(self) -> str | None:
        here = next(p for p in read_phases(self.run_dir / "logs") if p.rank == self.rank)
        if self.times > 0 and (here.name, here.step) == (self.phase, self.step):
            self.times -= 1
        return None if self.times > 0 else "SIGTERM"


def ask(trained: Trainer, name: str, place: str, request: Callable[..., Any], **where: Any) -> Path:
    """Train until the last rank is asked to stop."""
    processes = PLACES[place].processes
    run = trained.folder / name
    stop = request(run, rank=processes - 1, **where)
    options = [*MODELS["resnet"], *LONG, *PLACES[place].overrides, *SMALL_EVALUATION]
    stopped = trained.start(name, processes, *options, stop=stop)
    assert stopped == [None] * processes
    return run


def go_on(trained: Trainer, name: str, place: str) -> None:
    """To the end, elsewhere, and compare."""
    options = [*MODELS["resnet"], *LONG, *PLACES[place].overrides]
    run = trained(name, PLACES[place].processes, *options)
    check_same_run(run, trained.reference("resnet", *LONG))


SMALL_EVALUATION = ["evaluate.batch=1"]
"""Two processes evaluate 23 images in 12 forward passes, and agree on stopping before the ninth."""


def test_asked_within_a_step(trained: Trainer) -> None:
    name = "asked in step 5"
    run = ask(trained, name, "ddp2", Asked, phase="update", step=4)
    assert (newest(run), len(records(run, "step"))) == (5, 5)
    go_on(trained, name, "fsdp3 full")


@pytest.mark.parametrize(
    "step, times, first, then",
    [
        pytest.param(3, 5, "ddp2", "single", id="raw weights"),
        pytest.param(6, 16, "fsdp2 full", "ddp3", id="averaged weights, swapped in"),
        pytest.param(9, 5, "ddp2", "fsdp2 full", id="last evaluation"),
    ],
)
def test_asked_while_it_evaluates(
    trained: Trainer, step: int, times: int, first: str, then: str
) -> None:
    """Saved at once; the evaluation is done again, and told once."""
    name = f"asked in evaluation {step}"
    run = ask(trained, name, first, Asked, phase="evaluate", step=step, times=times)
    assert newest(run) == step
    assert step not in {e["step"] for e in records(run, "eval")}
    assert not (run / "DONE").exists()
    go_on(trained, name, then)


@dataclass
class AskedWhileSaving:
    """A request to stop that arrives when the first save has begun, but not ended perhaps."""

    run_dir: Path
    rank: int
    certain_after: int
    """Steps after which the save must have been ordered: wait for its first trace then."""
    regroup: bool = False

    @property
    def requested(self) -> str | None:
        here = next(p for p in read_phases(self.run_dir / "logs") if p.rank == self.rank)
        deadline = time.monotonic() + 60
        while not (begun := any((self.run_dir / "checkpoints").glob("step-*"))):
            if here.step < self.certain_after or time.monotonic() > deadline:
                break
            time.sleep(0.01)
        return "SIGTERM" if begun else None


def test_asked_while_it_saves(trained: Trainer) -> None:
    """The save ends, the run stops, saves again, and goes on from there."""
    name, run = "asked in a save", trained.folder / "asked in a save"
    options = [*MODELS["resnet"], *LONG, *PLACES["ddp2"].overrides, "checkpoint.every_steps=4"]
    stop = AskedWhileSaving(run, rank=1, certain_after=6)
    assert trained.start(name, 2, *options, stop=stop) == [None, None]
    assert {path.name for path in run.glob("checkpoints/step-*")} == {
        "step-4",
        f"step-{newest(run)}",
    }
    assert 4 <= newest(run) == len(records(run, "step")) < 9
    go_on(trained, name, "hsdp 2x2")


# --- the end of a run -------------------------------------------------------------------------


def test_a_killed_export_is_made_up_for(trained: Trainer, tmp_path: Path) -> None:
    """After the last step, but before DONE: the next start trains nothing and ends the run."""
    whole = trained.reference("resnet", *LONG)
    torn = tmp_path / "torn"
    shutil.copytree(whole, torn, symlinks=True)
    for name in ("DONE", "model.safetensors"):
        (torn / name).unlink()
    trained.start(str(torn), 1, *MODELS["resnet"], "strategy=single", *LONG)
    check_same_run(torn, whole, tolerance=0)
    assert summary(torn) == summary(whole)
    assert (torn / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_the_command_trains_stops_goes_on_and_ends(
    trained: Trainer, train: Callable[..., Any], data: Path, tmp_path: Path
) -> None:
    door = partial(train, *BASE, *MODELS["vit"], f"data.root={data}", "run.name=run")
    run = tmp_path / "runs" / "run"
    first = door("strategy=ddp", "launch.processes=2", "stop_at=1")
    assert first.returncode == 85, first.stderr
    then = door("strategy=fsdp", "launch.processes=2")
    assert then.returncode == 0, then.stderr
    check_same_run(run, trained.reference("vit"))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    again = door()
    assert again.returncode == 0, again.stderr
    assert "already finished" in again.stdout + again.stderr
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
