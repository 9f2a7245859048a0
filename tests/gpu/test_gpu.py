"""Real models on real JPEGs on a GPU: every precision, every strategy through NCCL.

The images are a sample of ImageNet, not part of the project: one JPEG for each of 500 classes, here
grouped into ten. ``LOCKSTEP_IMAGENET_SAMPLE`` names the tar where it lies elsewhere.
"""

from __future__ import annotations

import math
import os
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.launch.prepare import machine
from tests.conftest import REPOSITORY
from tests.runs import configure, plan_of, records, train_one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SAMPLE = Path(
    os.environ.get(
        "LOCKSTEP_IMAGENET_SAMPLE", REPOSITORY.parent / "shared/data/imagenet_sample.tar"
    )
)
STEPS = 5
Losses = Callable[..., tuple[list[float], list[str]]]
MODELS = {
    "resnet50": ["model=resnet50", "optimizer=sgd", "augment=standard"],
    "vit": ["model=vit", "optimizer=adamw", "optimizer.lr=3e-4", "augment=strong"],
}
NCCL = {
    "ddp": ["strategy=ddp"],
    "fsdp full": ["strategy=fsdp"],
    "fsdp grad_op": ["strategy=fsdp", "strategy.shard=grad_op"],
    "hsdp": ["strategy=hsdp"],
}
TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 3e-2, "fp16": 3e-2}
"""Relative, of the loss over five steps in which it moves by tens of percent."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not SAMPLE.exists():
        pytest.skip(f"no ImageNet sample at {SAMPLE}")
    root = tmp_path_factory.mktemp("images")
    with tarfile.open(SAMPLE) as archive:
        archive.extractall(root / "raw", filter="data")
    for i, file in enumerate(sorted(root.rglob("*.JPEG"))):
        split = "val" if i % 5 == 4 else "train"
        folder = root / split / f"group{i // 50}"
        folder.mkdir(parents=True, exist_ok=True)
        file.rename(folder / file.name)
    return root


@pytest.fixture(scope="module")
def losses(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses and sample digests of a short training, each computed once."""
    folder = tmp_path_factory.mktemp("runs")
    known: dict[tuple[str, ...], tuple[list[float], list[str]]] = {}

    def train(model: str, *overrides: str) -> tuple[list[float], list[str]]:
        key = (model, *overrides)
        if key not in known:
            config = configure(
                "data=folder",
                f"data.root={images}",
                "device=cuda",
                f"steps={STEPS}",
                "batch.global=32",
                "batch.micro=16",
                "launch.processes=1",
                "evaluate.every_epochs=null",
                "checkpoint.every_epochs=null",
                "telemetry.console=false",
                *MODELS[model],
                *overrides,
            )
            run_dir = folder / str(len(known))
            assert train_one_rank(config, plan_of(config, machine()), run_dir)
            (evaluation,) = records(run_dir, "eval")
            assert evaluation["count"] == 100
            steps = records(run_dir, "step")
            known[key] = ([s["loss"] for s in steps], [s["sample_digest"] for s in steps])
        return known[key]

    return train


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a group of one, as torchrun describes it."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    values = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**values, "MASTER_ADDR": "localhost", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("model", MODELS)
def test_every_precision_trains(losses: Losses, model: str, precision: str) -> None:
    got, digests = losses(model, "strategy=single", f"precision={precision}")
    expected, expected_digests = losses(model, "strategy=single", "precision=fp32")
    assert digests == expected_digests and len(set(digests)) == STEPS
    assert all(math.isfinite(loss) for loss in got)
    assert got == pytest.approx(expected, rel=TOLERANCE[precision])


@pytest.mark.parametrize("strategy", NCCL)
@pytest.mark.parametrize("model", MODELS)
def test_nccl_gives_the_same_run(losses: Losses, nccl: None, model: str, strategy: str) -> None:
    got, digests = losses(model, *NCCL[strategy], "precision=fp32")
    expected, expected_digests = losses(model, "strategy=single", "precision=fp32")
    assert digests == expected_digests
    assert got == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp full"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_half_precision_through_nccl(
    losses: Losses, nccl: None, model: str, precision: str, strategy: str
) -> None:
    got, _ = losses(model, *NCCL[strategy], f"precision={precision}")
    expected, _ = losses(model, "strategy=single", "precision=fp32")
    assert got == pytest.approx(expected, rel=TOLERANCE[precision])


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(["strategy=dp"], id="dp"),
        pytest.param(["strategy=fsdp", "strategy.cpu_offload=true"], id="offload"),
        pytest.param(["strategy=fsdp", "strategy.meta_init=true"], id="meta init"),
        pytest.param(
            ["strategy=single", "model.activation_checkpointing=true"], id="checkpointing"
        ),
    ],
)
def test_options_change_nothing(losses: Losses, change: list[str]) -> None:
    got, digests = losses("vit", *change, "precision=fp32")
    expected, expected_digests = losses("vit", "strategy=single", "precision=fp32")
    assert digests == expected_digests
    assert got == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "strategy", [["strategy=single"], ["strategy=fsdp"]], ids=["single", "fsdp"]
)
def test_compiled_vit(losses: Losses, strategy: list[str]) -> None:
    got, _ = losses("vit", *strategy, "precision=bf16", "compile=default")
    expected, _ = losses("vit", "strategy=single", "precision=fp32")
    assert got == pytest.approx(expected, rel=TOLERANCE["bf16"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", NCCL)
@pytest.mark.parametrize("model", MODELS)
def test_all_gpus_give_the_same_run(
    losses: Losses, train: Any, images: Path, tmp_path: Path, model: str, strategy: str
) -> None:
    done = train(
        "data=folder",
        f"data.root={images}",
        f"steps={STEPS}",
        "batch.global=32",
        "batch.micro=16",
        "run.name=all",
        "evaluate.every_epochs=null",
        "telemetry.console=false",
        *MODELS[model],
        *NCCL[strategy],
        CUDA_VISIBLE_DEVICES=",".join(str(i) for i in range(torch.cuda.device_count())),
    )
    assert done.returncode == 0, done.stderr
    expected, expected_digests = losses(model, "strategy=single", "precision=fp32")
    steps = records(tmp_path / "runs/all", "step")
    assert [s["sample_digest"] for s in steps] == expected_digests
    assert [s["loss"] for s in steps] == pytest.approx(expected, rel=1e-3)
