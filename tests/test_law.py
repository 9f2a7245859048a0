"""The lockstep law: the same run whichever strategy, number of processes or slices.

The training is real (images, augmentation, gloo, checkpoints), only small. Every run is compared
with one process. Interruptions are in test_resume.py.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from lockstep.telemetry.compare import Comparison
from tests.law import CELLS, GLOBAL, MODELS, TRAIN, VAL, Cell, Trainer, check_same_run, write_data
from tests.law_table import table
from tests.runs import records

MICRO = "batch.micro=9"  # 50 is six of them: with four processes, some idle in the last round


@pytest.fixture(scope="module")
def trained(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("law")
    return Trainer(pool, write_data(folder / "data"), folder / "runs")


def test_the_reference_trains(trained: Trainer) -> None:
    run = trained.reference("vit")
    steps = records(run, "step")
    assert [s["samples_seen"] for s in steps] == [GLOBAL, TRAIN, TRAIN + GLOBAL, 2 * TRAIN]
    assert len({s["sample_digest"] for s in steps}) == len(steps)
    evaluations = records(run, "eval")
    assert [e["weights"] for e in evaluations] == ["raw", "ema"] * 2
    assert {e["count"] for e in evaluations} == {VAL}
    options = ["augment=none", "model.drop_path=0", "evaluate.every_epochs=null"]
    options += ["batch.global=16", "epochs=25"]
    losses = [s["loss"] for s in records(trained.reference("vit", *options), "step")]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_same_run(trained: Trainer, cell: Cell) -> None:
    run = trained.cell(cell)
    check_same_run(run, trained.reference(cell.model, *cell.reference))
    assert {e["count"] for e in records(run, "eval")} == {VAL}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(["strategy.shard=none"], id="shard none"),
        pytest.param(["strategy.cpu_offload=true"], id="offload"),
        pytest.param(["strategy.meta_init=true"], id="meta init"),
        pytest.param(["model.draw=parameter"], id="weights drawn by shard"),
        pytest.param(["strategy.prefetch=2"], id="prefetch"),
        pytest.param(["model.activation_checkpointing=true"], id="checkpointing"),
        pytest.param(["optimizer.clip_grad_norm=0.1"], id="clipping"),
        pytest.param(["evaluate.batch=3"], id="small evaluation batches"),
        pytest.param(["data.workers=3", "data.prefetch=1"], id="other threads"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_same_run_with(trained: Trainer, model: str, change: list[str]) -> None:
    law = [c for c in change if c.startswith(("optimizer.", "model.draw"))]
    name = f"{model} with {' '.join(change)}"
    run = trained(name, 2, *MODELS[model], "strategy=fsdp", MICRO, *change)
    check_same_run(run, trained.reference(model, MICRO, *law))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("processes", [2, 4])
def test_same_run_with_gradients_sent_after_the_pass(
    trained: Trainer, model: str, processes: int
) -> None:
    name = f"{model} after {processes}"
    options = [*MODELS[model], "strategy=ddp", "strategy.reduce=after", MICRO]
    run = trained(name, processes, *options)
    check_same_run(run, trained.reference(model, MICRO))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "processes, strategy, precision",
    [(1, "dp", "bf16"), (2, "ddp", "bf16"), (2, "fsdp", "bf16"), (2, "fsdp", "fp16")],
)
def test_half_precision_trains(
    trained: Trainer, processes: int, strategy: str, model: str, precision: str
) -> None:
    half = [f"precision={precision}", "precision.initial_scale=1024", MICRO]
    name = f"{model} {strategy} {precision}"
    run = trained(name, processes, *MODELS[model], f"strategy={strategy}", *half)
    losses = [s["loss"] for s in records(run, "step")]
    expected = [s["loss"] for s in records(trained.reference(model, MICRO), "step")]
    assert losses == pytest.approx(expected, rel=0.05)
    assert all(math.isfinite(s["grad_norm"]) for s in records(run, "step"))


def test_unreadable_images_are_counted(trained: Trainer, few_digits: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    shutil.copytree(few_digits, root)
    for path in [*sorted(root.glob("train/*/*"))[5::20], *sorted(root.glob("val/*/*"))[3:4]]:
        path.write_bytes(b"no image")
    options = [*MODELS["vit"], f"data.root={root}", "data.on_error=skip", "epochs=1", MICRO]
    run, alone = tmp_path / "run", tmp_path / "alone"
    for summary in trained.start(str(run), 2, *options, "strategy=ddp"):
        assert summary is not None
        left_out = {split: len(names) for split, names in summary["left_out"].items()}
        assert left_out == {"train": 3, "val": 1}
    assert {e["count"] for e in records(run, "eval")} == {VAL - 1}
    assert all(math.isfinite(s["loss"]) for s in records(run, "step"))
    trained.start(str(alone), 1, *options, "strategy=single")
    check_same_run(run, alone)


def test_the_table_tells_every_cell() -> None:
    same, other = Comparison(4, 2e-7, None), Comparison(1, 0.0, "step 2: loss 1 and 2")
    findings = dict.fromkeys(CELLS, same) | {CELLS[-1]: other}
    title, rule, *rows, blank_and_sum = table(findings)
    assert title.count("|") == rule.count("|") == 6
    told = [field.strip() for row in rows for field in row.split("|")[2:-1]]
    assert told.count("2.0e-07") == len(CELLS) - 1
    assert told.count("reference") == len(told) - len(CELLS)
    assert told[-1] == "step 2: loss 1 and 2"
    assert blank_and_sum.startswith(f"\n{len(CELLS)} cells, {len(CELLS) - 1} the same run")
