"""Cases measured in one process, in several, beside peers; what becomes of them in tables."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from lockstep.config.plan import Machine, Plan
from lockstep.config.schema import Config
from lockstep.doctor import bench, case, peers
from lockstep.doctor.bench import Case, compare, figures, make_case, measure
from lockstep.doctor.chart import chart
from lockstep.doctor.clock import Effort
from lockstep.doctor.hardware import peak_flops
from lockstep.doctor.synthetic import images_and_targets
from lockstep.errors import UserError
from scripts import bench as door
from tests.conftest import REPOSITORY, clean_environment
from tests.runs import NeverStop

CONF = REPOSITORY / "conf"
CPU = torch.device("cpu")
SMALL = ("data.image_size=16", "data.num_classes=4", "device=cpu")
VIT = ("model=vit_tiny", "model.kwargs={depth: 1, embed_dim: 24, num_heads: 2}")
EFFORT = Effort(steps=2, repeat=2, warmup=1, profile=True)


def small_case(*words: str, way: str = "lockstep", processes: int = 1) -> Case:
    told = [word for word in VIT if not any(w.startswith("model=") for w in words)]
    return make_case(CONF, way, [*SMALL, *words], told, processes=processes, batch=4)


def figures_of_a_rank(config: Config, plan: Plan, run_dir: Path) -> Any:
    case.run(config, plan, run_dir, NeverStop())
    return case.result(run_dir)


@pytest.mark.parametrize(
    "way, words, processes",
    [
        pytest.param("lockstep", ["strategy=single"], 1, id="alone"),
        pytest.param("lockstep", ["strategy=fsdp", "batch.micro=2"], 2, id="fsdp, accumulated"),
        pytest.param("lockstep", ["strategy=ddp", "augment=strong"], 2, id="ddp, mixed samples"),
        pytest.param("plain eager", ["strategy=ddp"], 2, id="peer"),
    ],
)
def test_processes_measure(
    pool: Any, tmp_path: Path, way: str, words: list[str], processes: int
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = bench._job(small_case(*words, way=way, processes=processes), EFFORT, run_dir)
    case.order(run_dir, way, EFFORT)
    found = pool(processes, figures_of_a_rank, job.config, job.plan, run_dir)[0]
    assert len(found["repeat_seconds"]) == 2
    assert 0 < found["first_step_seconds"] <= found["warmup_seconds"]
    assert found["profile"]["kinds"]["matmul"]["ms"] > 0
    assert ("communication" in found["profile"]["kinds"]) == (processes > 1)


def test_images_of_a_folder_are_measured(pool: Any, tmp_path: Path, few_digits: Path) -> None:
    """More steps than an epoch has; without its own words, what the folder holds."""
    words = [*SMALL[::2], "strategy=ddp", "batch.micro=2"]
    asked = make_case(CONF, "lockstep", words, VIT, processes=2, batch=6, images=few_digits)
    assert (asked.plan.data.num_train, asked.plan.data.num_classes) == (47, 4)
    assert asked.plan.steps_per_epoch < EFFORT.total_steps
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = bench._job(asked, EFFORT, run_dir)
    case.order(run_dir, "lockstep", EFFORT, real=True)
    found = pool(2, figures_of_a_rank, job.config, job.plan, run_dir)[0]
    assert len(found["repeat_seconds"]) == 2
    assert bench.way_of(asked.label).endswith("compile=off files")
    assert asked.label != make_case(CONF, "lockstep", words, VIT, processes=2, batch=6).label


def test_all_peers_train_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same weights after two steps as a loop by hand."""
    words = ["strategy=single", "optimizer=sgd", "optimizer.lr=0.1", "optimizer.weight_decay=0"]
    asked = small_case(*words, "optimizer.clip_grad_norm=0.5")
    config, plan = asked.config, asked.plan
    start = peers.create(config.model, plan.image_size, plan.data.num_classes, meta=False)
    expected = copy.deepcopy(start)
    optimizer = torch.optim.SGD(
        expected.parameters(), config.optimizer.lr * 1.0, momentum=0.9, nesterov=True
    )
    images, targets = images_and_targets(config, plan, plan.global_batch, CPU)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(expected(images), targets).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
        optimizer.step()
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    for way in peers.PEERS.values():
        model = copy.deepcopy(start)
        monkeypatch.setattr(peers, "create", lambda *_, model=model, **__: model)
        step = way(config, plan, CPU)
        step(), step()
        torch.testing.assert_close(model.state_dict(), expected.state_dict())


@pytest.mark.parametrize("way", peers.PEERS)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_peers_compute_in_16_bits_beside_ours(
    monkeypatch: pytest.MonkeyPatch, way: str, precision: str
) -> None:
    asked = small_case("strategy=single", "precision=bf16")
    config = asked.config.model_copy(
        update={"precision": asked.config.precision.model_copy(update={"name": precision})}
    )
    seen = []

    def watched(*args: Any, **kwargs: Any) -> torch.nn.Module:
        model = create(*args, **kwargs)
        model.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        return model

    create = peers.create
    monkeypatch.setattr(peers, "create", watched)
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    peers.PEERS[way](config, asked.plan, CPU)()
    assert seen == [True]


def test_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case in processes of its own, as a user would measure it; and compared with itself."""
    for name, value in clean_environment().items():
        monkeypatch.setenv(name, value)
    file, picture = tmp_path / "new/bench.json", tmp_path / "new/bench.png"
    words = (
        "--models test_vit --device cpu --image-size 32 --batch 2 --steps 1 --repeat 2 --warmup 1"
    )
    words += f" --no-peers --compile off --strategies single,dp --json {file} --png {picture}"
    assert door.main([*words.split(), "--strategies", "single", "data.num_classes=4"]) == 0
    told = json.loads(file.read_text())
    (row,) = told["rows"]
    assert (row["model"], row["optimizer"], row["processes"]) == ("test_vit", "adamw", 1)
    assert row["images_per_second"]["least"] <= row["images_per_second"]["median"]
    assert (row["mfu"], row["memory_bytes"], row["gpu"]) == (None, None, None)
    assert told["versions"]["torch"] == torch.__version__
    assert Image.open(picture).width > 1000
    assert door.main(["compare", str(file), str(file)]) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        pytest.param("--models restnet50", "model.name = restnet50: timm has no such", id="model"),
        pytest.param("--strategies ddb", "strategy = ddb: no such option", id="strategy"),
        pytest.param("--image-size 100", "data.image_size = 100: not a multiple", id="size"),
        pytest.param("optimizer.rl=1", "optimizer.rl: unknown key", id="override"),
        pytest.param("compare gone.json gone.json", "gone.json: not a file of", id="no file"),
        pytest.param("compare {other} {other}", "not a file of scripts/bench.py", id="other file"),
    ],
)
def test_mistakes(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": [1]}')
    words = words.format(other=other)
    extra = [] if "compare" in words else ["--models", "vit_tiny_patch16_224", "--no-peers"]
    assert door.main([*extra, "--device", "cpu", *words.split()] if extra else words.split()) == 2
    assert message in capsys.readouterr().err


def test_what_the_plan_refuses_is_a_row() -> None:
    matrix = bench.Matrix(
        models=["test_vit"],
        strategies=["single", "ddp"],
        precisions=["bf16", "fp32"],
        compile=["off"],
        peers=["plain eager"],
        batch=4,
        image_size=32,
        device="cpu",
        processes=2,
    )
    found = list(bench.cases_of(CONF, matrix))
    refused = [c for c in found if not isinstance(c, Case)]
    assert [label["strategy"] for label, _ in refused] == ["single", "single"]
    assert "use strategy=ddp or fsdp" in refused[0][1]
    assert bench.way_of(refused[0][0]) == "lockstep single bf16 compile=off"
    names = [bench.way_of(c.label) for c in found if isinstance(c, Case)]
    assert names == [
        "lockstep ddp bf16 compile=off",
        "plain eager bf16 ddp",
        "lockstep ddp fp32 compile=off",
        "plain eager fp32 ddp",
    ]


@pytest.mark.parametrize(
    "module, seconds, reason",
    [
        pytest.param("lockstep.doctor.nowhere", 60, "No module named", id="crash"),
        pytest.param(case.MODULE, 0.01, "not done in 0.01 s: raise --timeout", id="too slow"),
    ],
)
def test_a_lost_case_is_a_row(
    monkeypatch: pytest.MonkeyPatch, module: str, seconds: float, reason: str
) -> None:
    asked = small_case("strategy=single")
    monkeypatch.setattr(case, "MODULE", module)
    row = measure(asked, EFFORT, timeout_seconds=seconds)
    assert reason in row["error"]
    assert reason in bench.line(row)


@pytest.mark.parametrize(
    "log, reason",
    [
        ("x\ntorch.OutOfMemoryError: CUDA out of memory. Tried\n  more\n", "out of memory"),
        ("rank 1 failed:\nTraceback\nValueError: no\nrank 0 lost it\n", "ValueError: no"),
        ("error: optimizer.name = x: unknown\n", "error: optimizer.name = x: unknown"),
        ("", "ended without a word"),
    ],
)
def test_reason(log: str, reason: str) -> None:
    assert bench._reason(log) == reason


def test_a_measured_step_is_one_of_a_long_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """``compile=auto`` leaves short runs as they are."""
    gpu = Machine(num_gpus=1, cores=1, gpu_memory_bytes=None)
    monkeypatch.setattr(bench, "machine", lambda: gpu)
    asked = small_case("strategy=single", "device=cuda", "compile=auto")
    assert bench.way_of(asked.label) == "lockstep single fp32 compile=graphs"


def test_figures() -> None:
    asked = small_case("strategy=single", "precision=bf16")
    found = {"first_step_seconds": 3.0, "warmup_seconds": 4.0, "repeat_seconds": [1.0, 2.0, 4.0]}
    found |= {"memory_bytes": 5, "gpu": "NVIDIA H200", "profile": None}
    row = figures(asked, Effort(steps=2, repeat=3, warmup=1, profile=False), found)
    assert row["images_per_second"] == {
        "median": 4.0, "least": 2.0, "most": 8.0, "values": [8.0, 4.0, 2.0]
    }  # fmt: skip
    assert row["ms_per_step"]["median"] == 1000
    assert row["compile_seconds"] == 2
    flops = 3 * asked.plan.model.forward_flops
    assert row["roofline_images_per_second"] == round(989.4e12 / flops, 1)
    assert row["mfu"] == round(4.0 * flops / 989.4e12, 4)


@pytest.mark.parametrize(
    "gpu, precision, tflops",
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H200", "fp8", 1979),
        ("NVIDIA A100-PCIE-40GB", "fp16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H100 PCIe", "bf16", None),
        ("NVIDIA H100 NVL", "bf16", None),
        ("NVIDIA L4", "bf16", None),
        ("", "fp32", None),
    ],
)
def test_peak(gpu: str, precision: str, tflops: float | None) -> None:
    assert peak_flops(gpu, precision) == (tflops and pytest.approx(tflops * 1e12))


def row(rate: float = 100.0, **changes: Any) -> dict[str, Any]:
    told = {
        "model": "resnet50", "way": "lockstep", "strategy": "single", "precision": "bf16",
        "compile": "off", "processes": 1, "global_batch": 8, "image_size": 224, "gpu": None,
        "images_per_second": {"median": rate, "least": rate - 1, "most": rate + 1},
        "roofline_images_per_second": None,
    }  # fmt: skip
    return told | changes


@pytest.mark.parametrize(
    "old, new, slower, told",
    [
        pytest.param([row()], [row(96)], False, "-4.0%", id="within"),
        pytest.param([row()], [row(94)], True, "SLOWER", id="slower"),
        pytest.param([row()], [row(200)], False, "+100.0%", id="faster"),
        pytest.param([row()], [row(error="out of memory")], True, "out of memory", id="lost"),
        pytest.param([row(error="x")], [row()], False, "was: x", id="found"),
        pytest.param(
            [row(), row(compile="default")], [row()], False, "only in the old file", id="missing"
        ),
    ],
)
def test_compare(old: Any, new: Any, slower: bool, told: str) -> None:
    before = {"rows": old, "versions": {"torch": "2.13"}, "gpus": ["A, 1 MiB, 1"]}
    lines, found = compare(before, {"rows": new, "versions": {"torch": "2.14"}}, 0.05)
    assert found is slower
    assert any(told in text for text in lines)
    assert lines[:2] == [
        "note: GPU was A, 1 MiB, 1, and is none",
        "note: torch was 2.13, and is 2.14",
    ]


def test_nothing_to_compare() -> None:
    with pytest.raises(UserError, match="no case in common"):
        compare({"rows": [row()]}, {"rows": [row(model="vit")]}, 0.05)


@pytest.mark.parametrize("rate", [0.3, 7.0, 8000.0, 123456.0])
def test_chart(rate: float) -> None:
    rows = [row(rate), row(rate / 2, way="timm", roofline_images_per_second=3 * rate)]
    rows.append(row(error="out of memory"))
    few = chart(rows, "title")
    colours = {colour for _, colour in few.getcolors(1 << 20) or ()}
    assert {(31, 105, 175), (165, 175, 185), (190, 30, 30)} <= colours
    assert chart([*rows, row(model="vit")], "title").height > few.height
    assert chart([], "title").height > 0
