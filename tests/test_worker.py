from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from lockstep import dist, worker
from lockstep.engine.state import TrainState
from lockstep.errors import UserError
from tests.runs import NeverStop, configure, plan_of, train_one_rank

SMALL = [
    *("data=digits", "data.num_classes=null", "data.num_train=null", "data.num_val=null"),
    *("model=vit_tiny", "+model.kwargs.depth=1", "device=cpu", "telemetry.console=false"),
]


def loader(digest: str) -> Any:
    return SimpleNamespace(source=SimpleNamespace(digest=digest))


def test_ranks_that_see_different_images_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure("data=digits")
    worker.refuse_different_data(config, loader("a"), loader("b"))
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, mine, ["a", "c"]])
    with pytest.raises(UserError, match=r"data\.root = .*rank 2 sees other images than rank 0"):
        worker.refuse_different_data(config, loader("a"), loader("b"))


class Decoders:
    """Of a loader, what decides who decodes."""

    def __init__(self, rates: tuple[float, float] = (1000.0, 4000.0), why: str | None = None):
        self.gpu_share = -1.0
        self._rates, self._why = rates, why

    def prepare_gpu(self) -> str | None:
        return self._why

    def rates(self, seconds: float) -> tuple[float, float]:
        return self._rates


def shared(
    *overrides: str, loader: Decoders, before: float | None = None
) -> tuple[float, list[str]]:
    """The share of all loaders, and what is told."""
    meta = {"law": {}, "data": {}, "progress": {}, "scaler": {}, "optimizer": {}}
    meta |= {"world_size": 1, "micro_batch": 1, "gpu_share": before}
    found: Any = None if before is None else SimpleNamespace(meta=meta, path="step-1")
    other = Decoders()
    config = configure("data=digits", "augment.policy=none", *overrides)
    notes = worker.share_decoding(config, found, loader, other)  # type: ignore[arg-type]
    assert other.gpu_share == loader.gpu_share
    return loader.gpu_share, notes


def test_who_decodes() -> None:
    assert shared("data.decode=cpu", loader=Decoders(why="no GPU")) == (0.0, [])
    assert shared("data.decode=gpu", loader=Decoders()) == (1.0, [])
    hybrid = ("data.decode=hybrid", "data.gpu_share=0.4")
    assert shared(*hybrid, loader=Decoders()) == (0.4, [])
    for decode in ("auto", "hybrid"):
        share, (note,) = shared(f"data.decode={decode}", loader=Decoders())
        assert share == 1.0 and "1,000 images/s by the CPU, 4,000 by the GPU" in note
    share, (note,) = shared("data.decode=auto", loader=Decoders(rates=(6000.0, 4000.0)))
    assert share == 0.0 and "takes 0%" in note


def test_gpus_that_cannot_decode() -> None:
    for decode in ("gpu", "hybrid"):
        with pytest.raises(UserError, match=f"data.decode = {decode}: no engines: use data.decode"):
            shared(f"data.decode={decode}", loader=Decoders(why="no engines"))
    assert shared("data.decode=auto", loader=Decoders(why="no engines")) == (0.0, [])
    policy = ("data.decode=auto", "augment.policy=randaugment")
    assert shared(*policy, loader=Decoders()) == (0.0, [])


def test_a_resume_keeps_the_share_or_says_so() -> None:
    assert shared("data.decode=auto", loader=Decoders(), before=0.25) == (0.25, [])
    with pytest.raises(UserError, match=r"step-1: not a checkpoint .*gpu_share"):
        shared("data.decode=auto", loader=Decoders(), before="x")  # type: ignore[arg-type]
    share, (note,) = shared("data.decode=auto", loader=Decoders(why="no GPU"), before=0.25)
    assert share == 0.0 and "decoded 25% of the JPEGs before and decodes 0% now" in note


class LooksForGarbage(NeverStop):
    """Asked once in each step."""

    found: ClassVar[list[bool]] = []

    @property
    def requested(self) -> str | None:  # type: ignore[override]
        self.found.append(gc.isenabled())
        return None


def test_python_does_not_look_for_garbage_within_steps(few_digits: Path, tmp_path: Path) -> None:
    config = configure(*SMALL, f"data.root={few_digits}", "batch.global=8", "steps=3")
    stop = LooksForGarbage()
    assert train_one_rank(config, plan_of(config), tmp_path, stop) is not None
    assert len(stop.found) >= 3 and not any(stop.found)
    assert gc.isenabled()


def built(few_digits: Path, *words: str) -> TrainState:
    """State of a process that is alone in its group."""
    config = configure(*SMALL, f"data.root={few_digits}", *words)
    device = dist.init("cpu", 60, group_of_one=True)
    try:
        return worker.build_state(config, plan_of(config), device)[0]
    finally:
        dist.shutdown()


@pytest.mark.parametrize(("wrap", "by_block"), [("block", True), ("model", False)])
def test_what_fsdp_leaves_to_the_compiler(
    few_digits: Path, monkeypatch: pytest.MonkeyPatch, wrap: str, by_block: bool
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(worker, "compile_in_place", lambda *_, **how: told.append(how["by_block"]))
    words = ["strategy=fsdp", "strategy.shard=grad_op", f"strategy.wrap={wrap}", "compile=default"]
    built(few_digits, *words)
    assert told == [by_block]


@pytest.mark.parametrize("offload", [True, False])
def test_an_offloaded_update_is_one_kernel(few_digits: Path, offload: bool) -> None:
    """On a CPU alone it is not: runs there go on as they began."""
    words = ["strategy=fsdp", f"strategy.cpu_offload={offload}", "optimizer=adamw"]
    assert bool(built(few_digits, *words).optimizer.defaults["fused"]) is offload


class Recorder:
    """In the place of recorded passes, which need a GPU."""

    told: ClassVar[list[str]] = []

    def __init__(self, parameters: object) -> None:
        pass

    def __call__(self, compute: Any, inputs: Any) -> Any:
        self.told.append("pass")
        return compute(*inputs)

    def release(self) -> None:
        self.told.append("released")


@pytest.mark.parametrize("stop_at", [None, 2])
def test_recorded_passes_are_given_up_before_the_group_is_left(
    few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_at: int | None
) -> None:
    """NCCL would wait for them; also when the run is stopped, whose exception keeps all frames."""
    told = Recorder.told
    told.clear()
    monkeypatch.setattr(worker, "PassGraphs", Recorder)
    monkeypatch.setattr(dist, "shutdown", lambda: told.append("left"))
    stop = f"stop_at={stop_at}" if stop_at else "stop_at=null"
    config = configure(*SMALL, f"data.root={few_digits}", "batch.global=10", "steps=4", stop)
    plan = replace(plan_of(config), records=True)
    train_one_rank(config, plan, tmp_path)
    assert told == ["pass"] * (stop_at or 4) + ["released", "left"]


def test_short_steps_of_fsdp_are_not_recorded(
    few_digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent in a pass is recorded by all ranks or by none, and parts of a short step differ."""
    told = Recorder.told
    told.clear()
    monkeypatch.setattr(worker, "PassGraphs", Recorder)
    for name in ("single", "fsdp"):
        config = configure(
            *SMALL, f"data.root={few_digits}", f"strategy={name}", "batch.global=32", "epochs=2"
        )
        plan = replace(plan_of(config), records=True)
        assert plan.steps_per_epoch == 2 and plan.last_window < 32
        told.clear()
        train_one_rank(config, plan, tmp_path / name)
        assert told.count("pass") == (4 if name == "single" else 2)
