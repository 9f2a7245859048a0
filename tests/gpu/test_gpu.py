"""Whole runs on CUDA: ResNet-50 and ViT-B on ImageNet's own JPEGs, every strategy and precision.

The images come from a sample of ImageNet, ``imagenet_sample.tar`` or its unpacked ``train/``:
beside the repository in ``shared/data``, or where LOCKSTEP_IMAGENET_SAMPLE says.
"""

from __future__ import annotations

import math
import os
import shutil
import tarfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.checkpoint import writer
from lockstep.checkpoint.store import Store, find_checkpoint
from lockstep.config.plan import Machine
from lockstep.engine.loop import StopRequest
from tests.conftest import REPOSITORY, free_port
from tests.runs import NeverStop, configure, plan_of, records, train_one_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
NUM_GPUS = torch.cuda.device_count()
NUM_VAL = 50
STEPS = 4
BASE = [
    *("data=folder", "data.on_error=stop", "augment=standard", "schedule=constant"),
    *("batch.global=32", "batch.micro=16", f"steps={STEPS}", f"evaluate.batch={NUM_VAL}"),
    *("evaluate.every_epochs=null", "checkpoint.every_epochs=null", "telemetry.console=false"),
    *(f"device={DEVICE}", "precision.initial_scale=1024"),
]
MODELS = {
    "resnet50": [
        "model=resnet50",
        "optimizer=sgd",
        "optimizer.lr=0.01",
        "optimizer.base_batch=null",
    ],
    "vit": ["model=vit", "optimizer.lr=1e-4"],
}
SMALL = {
    "resnet18": ["model=resnet18", *MODELS["resnet50"][1:]],
    "vit": ["model=vit_tiny", "+model.kwargs.depth=3", "model.drop_path=0.1", "optimizer.lr=1e-4"],
}
SHARED = {
    "ddp": ["strategy=ddp"],
    "fsdp": ["strategy=fsdp"],
    "fsdp grad_op": ["strategy=fsdp", "strategy.shard=grad_op"],
    "hsdp": ["strategy=hsdp"],
    "fsdp wrap=model": ["strategy=fsdp", "strategy.shard=grad_op", "strategy.wrap=model"],
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample as an ImageFolder of ten made-up classes; every tenth image is validated, too."""
    default = REPOSITORY.parent / "shared/data/imagenet_sample.tar"
    sample = Path(os.environ.get("LOCKSTEP_IMAGENET_SAMPLE", default))
    if sample.is_dir() and (sample / default.name).is_file():
        sample = sample / default.name
    if not sample.exists():
        pytest.skip(f"no ImageNet sample at {sample}: set LOCKSTEP_IMAGENET_SAMPLE")
    root = tmp_path_factory.mktemp("imagenet")
    if sample.is_file():
        with tarfile.open(sample) as tar:
            tar.extractall(root / "sample", filter="data")
        sample = root / "sample"
    paths = sorted(sample.glob("train/*/*.JPEG"))
    assert len(paths) >= 10 * NUM_VAL, f"{sample}: {len(paths)} images below train/"
    for i, path in enumerate(paths[: 10 * NUM_VAL]):
        splits = ["train", "val"] if i // 10 % 10 == 0 else ["train"]
        for split in splits:
            link = root / split / f"class{i % 10}" / path.name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
    return root


class Trainer:
    """Trains in this process, or on a pool with one process a GPU; keeps the records alone."""

    def __init__(self, pool: Any, images: Path, folder: Path) -> None:
        self._pool = pool
        self._images = images
        self._folder = folder
        self._done: dict[tuple[str, ...], list[dict[str, Any]]] = {}

    def __call__(self, *overrides: str, processes: int = 1) -> list[dict[str, Any]]:
        """Step records of a run, trained at the first call."""
        key = (*overrides, str(processes))
        if key not in self._done:
            run = self._folder / str(len(self._done))
            self.start(run, *overrides, processes=processes)
            assert {e["count"] for e in records(run, "eval")} == {NUM_VAL}
            self._done[key] = records(run, "step")
            shutil.rmtree(run)
        return self._done[key]

    def start(
        self, run: Path, *overrides: str, processes: int = 1, stop: StopRequest | None = None
    ) -> None:
        torch._dynamo.reset()
        config = configure(
            *BASE, f"data.root={self._images}", f"launch.processes={processes}", *overrides
        )
        cores = len(os.sched_getaffinity(0))
        plan = plan_of(config, Machine(NUM_GPUS, cores, gpu_memory_bytes=None))
        if processes > 1:
            self._pool(processes, train_one_rank, config, plan, run)
            return
        with group_of_one() if plan.strategy not in ("single", "dp") else nothing():
            train_one_rank(config, plan, run, stop)
        torch.cuda.empty_cache()


@contextmanager
def group_of_one() -> Iterator[None]:
    """What an agent would tell a process that is alone: NCCL is used all the same."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in place.items():
            patch.setenv(name, value)
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


@pytest.fixture(scope="module")
def trained(pool: Any, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    return Trainer(pool, images, tmp_path_factory.mktemp("runs"))


def check_trained(steps: list[dict[str, Any]]) -> None:
    each = steps[0]["samples_seen"]
    assert [s["samples_seen"] for s in steps] == [each * (i + 1) for i in range(len(steps))]
    assert all(math.isfinite(s[key]) for s in steps for key in ("loss", "grad_norm"))


def check_same_run(
    steps: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float
) -> None:
    check_trained(steps)
    assert len(expected) >= STEPS
    for key in ("step", "lr", "samples_seen", "sample_digest"):
        assert [s[key] for s in steps] == [s[key] for s in expected], key
    losses = [s["loss"] for s in expected]
    assert [s["loss"] for s in steps] == pytest.approx(losses, rel=tolerance)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
def test_every_precision_trains(trained: Trainer, model: str, precision: str) -> None:
    steps = trained(*MODELS[model], "strategy=single", f"precision={precision}")
    check_trained(steps)
    exact = trained(*MODELS[model], "strategy=single", "precision=fp32")
    check_same_run(steps, exact, tolerance=0.1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shared", SHARED)
def test_same_run(trained: Trainer, shared: str, model: str) -> None:
    """One process, but the whole way through NCCL."""
    steps = trained(*MODELS[model], *SHARED[shared], "precision=fp32")
    exact = trained(*MODELS[model], "strategy=single", "precision=fp32")
    check_same_run(steps, exact, tolerance=1e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shared", ["ddp", "fsdp"])
def test_half_precision_is_shared(trained: Trainer, shared: str, model: str) -> None:
    steps = trained(*MODELS[model], *SHARED[shared], "precision=bf16")
    exact = trained(*MODELS[model], "strategy=single", "precision=fp32")
    check_same_run(steps, exact, tolerance=0.1)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("strategy=single", "default"),
        ("strategy=single", "graphs"),
        ("strategy=ddp strategy.reduce=backward", "default"),
        ("strategy=ddp strategy.reduce=after", "default"),
        ("strategy=ddp strategy.reduce=after", "graphs"),
        ("strategy=fsdp", "default"),
        ("strategy=fsdp", "graphs"),
    ],
)
def test_compiled(trained: Trainer, strategy: str, mode: str, model: str) -> None:
    options = [*MODELS[model], *strategy.split(), "precision=fp32", f"compile={mode}"]
    exact = trained(*MODELS[model], "strategy=single", "precision=fp32")
    check_same_run(trained(*options), exact, tolerance=1e-2)


RECORDED = ["steps=9", "evaluate.every_steps=6"]
"""The fourth step of one micro-batch is recorded: the following ones are replays, also after weights
were changed and an evaluation."""


def check_recorded(steps: list[dict[str, Any]], exact: list[dict[str, Any]]) -> None:
    check_same_run(steps, exact, tolerance=2e-2)
    norms = [s["grad_norm"] for s in exact]
    assert [s["grad_norm"] for s in steps] == pytest.approx(norms, rel=0.1)


@pytest.mark.parametrize("model", MODELS)
def test_recorded_with_kept_parameters(trained: Trainer, model: str) -> None:
    """Gathered for forward, kept for backward: one micro-batch a step alone."""
    options = [*MODELS[model], "precision=fp32", "batch.micro=null", *RECORDED]
    exact = trained(*options, "strategy=single")
    for wrap in ("block", "model"):
        sharded = ["strategy=fsdp", "strategy.shard=grad_op", f"strategy.wrap={wrap}"]
        check_recorded(trained(*options, *sharded, "compile=graphs"), exact)


@pytest.mark.parametrize("mode", ["default", "graphs"])
@pytest.mark.parametrize("model", MODELS)
def test_kernels_of_ours(trained: Trainer, model: str, mode: str) -> None:
    exact = trained(*MODELS[model], "strategy=single", "precision=fp32")
    found = trained(*MODELS[model], "strategy=single", "precision=bf16", f"compile={mode}")
    check_same_run(found, exact, tolerance=2e-2)


WIDE = ["model=vit_tiny", "optimizer.lr=1e-4",
        "+model.kwargs.embed_dim=1024", "+model.kwargs.depth=2", "+model.kwargs.num_heads=16"]  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(["precision=fp8", "compile=default"], id="8 bits"),
        pytest.param(["precision=fp8", "compile=graphs"], id="8 bits, recorded"),
        pytest.param(["precision=fp8", "compile=default", "strategy=fsdp"], id="8 bits, sharded"),
        pytest.param(
            ["precision=bf16", "compile=default", "precision.residual=low"], id="residual"
        ),
        pytest.param(["precision=fp32", "optimizer.name=adamw8bit"], id="moments of 8 bits"),
    ],
)
def test_the_curve_stays(trained: Trainer, change: list[str]) -> None:
    if "precision=fp8" in change or "optimizer.name=adamw8bit" in change:
        pytest.importorskip("torchao", reason="pip install torchao")
    exact = trained(*WIDE, "strategy=single", "precision=fp32")
    strategy = [] if "strategy=fsdp" in change else ["strategy=single"]
    tolerance = 0.05 if "precision=fp8" in change else 0.02
    check_same_run(trained(*WIDE, *strategy, *change), exact, tolerance)


def test_the_curve_stays_with_kernels_chosen_by_trial(trained: Trainer) -> None:
    """Narrow: fewer forms of kernels fit, so that it ends within minutes."""
    narrow = ["model=vit_tiny", "optimizer.lr=1e-4", "strategy=single"]
    narrow += [f"+model.kwargs.{key}" for key in ("embed_dim=64", "depth=2", "num_heads=1")]
    exact = trained(*narrow, "precision=fp32")
    check_same_run(trained(*narrow, "precision=bf16", "compile=max"), exact, tolerance=0.02)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_largest_micro_batch(trained: Trainer, strategy: str) -> None:
    """All 32 images fit: the same run as with none given."""
    options = [*SMALL["vit"], "precision=fp32"]
    exact = trained(*options, "strategy=single")
    found = trained(*options, f"strategy={strategy}", "batch.micro=auto")
    check_same_run(found, exact, tolerance=1e-3)


class WatchSteps(NeverStop):
    """Asked once in each step; has torch tell of every wait for the GPU in some of them."""

    def __init__(self, watched: range) -> None:
        self._watched = watched
        self._step = 0

    @property
    def requested(self) -> str | None:  # type: ignore[override]
        self._step += 1
        torch.cuda.set_sync_debug_mode("warn" if self._step in self._watched else "default")
        return None


@pytest.mark.parametrize(
    ("model", "options"),
    [
        pytest.param("resnet50", ["strategy=single"], id="resnet50"),
        pytest.param("resnet50", ["strategy=single", "compile=graphs"], id="resnet50, recorded"),
        pytest.param("resnet50", ["strategy=ddp", "ema.enabled=true"], id="resnet50, ddp, average"),
        pytest.param("vit", ["strategy=fsdp", "optimizer.clip_grad_norm=1"], id="vit, fsdp"),
    ],
)
def test_steps_do_not_wait_for_the_gpu(
    trained: Trainer, tmp_path: Path, model: str, options: list[str]
) -> None:
    steps, watched = 14, range(6, 13)  # before: compiling, recording; after: evaluation, save
    stop = WatchSteps(watched)
    options = [*MODELS[model], *options, "precision=bf16", "batch.micro=null", f"steps={steps}"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trained.start(tmp_path, *options, stop=stop)
    torch.cuda.set_sync_debug_mode("default")
    assert stop._step >= steps
    assert [str(w.message) for w in told if "called a synchronizing" in str(w.message)] == []
    torch.cuda.set_sync_debug_mode("warn")
    with pytest.warns(UserWarning, match="called a synchronizing"):  # that it would have been told
        torch.ones(1, device=DEVICE).item()
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("model", SMALL)
def test_dp(trained: Trainer, model: str) -> None:
    """All GPUs in one process; batch.micro is each device's part."""
    steps = trained(*SMALL[model], "strategy=dp", "precision=fp32")
    exact = trained(*SMALL[model], "strategy=single", "precision=fp32")
    check_same_run(steps, exact, tolerance=1e-3)


@pytest.mark.parametrize("model", SMALL)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(["strategy=fsdp", "strategy.cpu_offload=true"], id="offload"),
        pytest.param(["strategy=fsdp", "strategy.meta_init=true"], id="meta init"),
        pytest.param(["strategy=fsdp", "strategy.prefetch=2"], id="prefetch"),
        pytest.param(["strategy=dp", "model.activation_checkpointing=true"], id="dp, recompute"),
        pytest.param(["strategy=fsdp", "model.activation_checkpointing=true"], id="recompute"),
        pytest.param(["strategy=ddp", "strategy.sync_batchnorm=true"], id="synchronised BatchNorm"),
    ],
)
def test_same_run_with(trained: Trainer, model: str, change: list[str]) -> None:
    steps = trained(*SMALL[model], "precision=fp32", *change)
    exact = trained(*SMALL[model], "strategy=single", "precision=fp32")
    check_same_run(steps, exact, tolerance=1e-3)


@pytest.mark.parametrize(
    "model, first, then",
    [("resnet50", "single", "ddp"), ("vit", "fsdp", "single")],
    ids=["resnet50", "vit"],
)
def test_interrupted_run(
    trained: Trainer, tmp_path: Path, model: str, first: str, then: str
) -> None:
    options = [*MODELS[model], "precision=fp32"]
    trained.start(tmp_path, *options, f"strategy={first}", "stop_at=2")
    assert len(records(tmp_path, "step")) == 2
    trained.start(tmp_path, *options, f"strategy={then}")
    exact = trained(*options, "strategy=single")
    check_same_run(records(tmp_path, "step"), exact, tolerance=1e-3)
    shutil.rmtree(tmp_path / "checkpoints")


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shared", SHARED)
def test_same_run_on_all_gpus(
    trained: Trainer, train: Any, images: Path, tmp_path: Path, shared: str, model: str
) -> None:
    """Through train.py, each run in processes of its own, as users have it."""
    options = [*BASE, f"data.root={images}", *MODELS[model], *SHARED[shared], "precision=fp32"]
    visible = ",".join(str(i) for i in range(NUM_GPUS))
    done = train(*options, "run.name=all", CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stderr
    exact = trained(*MODELS[model], "strategy=single", "precision=fp32")
    check_same_run(records(tmp_path / "runs/all", "step"), exact, tolerance=1e-3)


@pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shared", ["ddp", "fsdp", "fsdp grad_op", "fsdp wrap=model"])
def test_recorded_on_all_gpus(
    trained: Trainer, train: Any, images: Path, tmp_path: Path, shared: str, model: str
) -> None:
    """What is sent in a pass is recorded with it, or all of it sent after the pass."""
    sizes = [f"batch.global={16 * NUM_GPUS}", "batch.micro=16"]
    options = [*MODELS[model], "precision=fp32", *sizes, *RECORDED]
    visible = ",".join(str(i) for i in range(NUM_GPUS))
    words = [*BASE, f"data.root={images}", *options, *SHARED[shared], "compile=graphs"]
    done = train(*words, "run.name=all", CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done.stderr
    exact = trained(*options, "strategy=single")
    check_recorded(records(tmp_path / "runs/all", "step"), exact)


@pytest.mark.parametrize("reserve", [0.0, 1.1], ids=["copied on the GPU", "straight to the host"])
def test_saves_behind_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reserve: float
) -> None:
    monkeypatch.setattr(writer, "_GPU_RESERVE", reserve)
    store = Store(tmp_path, keep_last=9, keep_best=False, asynchronous=True)
    weight = torch.zeros(2**26, device=DEVICE)
    buffer = torch.zeros(3, 5, 7, device=DEVICE)
    state = {
        "model": {"weight": weight, "buffer": buffer},
        "optimizer": {
            "step": torch.zeros(()),
            "narrow": weight.bfloat16()[:1001],
            "empty": torch.empty(0, device=DEVICE),
        },
    }

    def become(value: int) -> None:
        for tensor in (t for group in state.values() for t in group.values()):
            tensor.fill_(value)

    for step in range(1, 5):
        become(step)
        store.save(step, state, {"saved": step}, metric=None, changing=[buffer])
        buffer.fill_(-1)  # the next forward pass
        store.before_update()
        become(-step)
        if step == 2:  # it has turned out bad: given up while its copies are under way
            store.wait()
        store.approve(step)
    store.wait()
    store.close()
    assert {p.name for p in (tmp_path / "checkpoints").glob("step-*")} == {
        "step-1",
        "step-3",
        "step-4",
    }
    for step in (1, 3, 4):
        found = find_checkpoint(tmp_path / "checkpoints" / f"step-{step}")
        for group in Store.load_full(found).values():
            for name, tensor in group.items():
                assert (tensor == step).all(), (step, name)
