"""The lockstep law as a table of small, real trainings, each compared with one process.

``test_law.py`` and ``test_resume.py`` assert it, ``law_table.py`` prints it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file

from lockstep.config.bind import bind, save_config
from lockstep.config.plan import ModelFacts, Plan, make_plan
from lockstep.config.schema import Config, Model
from lockstep.engine.loop import StopRequest
from lockstep.launch.prepare import data_facts
from lockstep.models.build import count
from lockstep.telemetry.compare import compare_runs
from tests.conftest import REPOSITORY
from tests.runs import CPU, NeverStop, records, train_one_rank, write_few_digits

GLOBAL, TRAIN, VAL, NUM_CLASSES, EPOCHS = 50, 64, 23, 4, 2
"""Over four processes, 50 is 13 + 13 + 12 + 12, and what is left of an epoch 4 + 4 + 3 + 3."""
BASE = [
    "data.image_size=16",
    f"data.num_classes={NUM_CLASSES}",
    "data.workers=1",
    "device=cpu",
    f"batch.global={GLOBAL}",
    f"epochs={EPOCHS}",
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
        *("model=timm", "model.name=test_resnet", "+model.kwargs.output_stride=8"),
        *("model.drop_path=0.2", "augment=strong"),
        *("optimizer=sgd", "optimizer.base_batch=null", "optimizer.lr=0.005"),
    ],
}
"""With mixup, cutmix, RandAugment, erasing and stochastic depth."""

EXACT = 1e-4
"""Relative; float32 sums in another order differ by about 1e-7 a step.

BatchNorm amplifies that a hundredfold a step where it sees few values, even between two runs of
one process whose first weights differ by 1e-7: hence feature maps of 2 x 2 in the last stage, for
micro-batches of one or two images, and the gentle learning rate.
"""


@dataclass(frozen=True)
class Place:
    """Who computes a run."""

    name: str
    processes: int
    overrides: tuple[str, ...]


def _place(name: str, processes: int, *overrides: str) -> tuple[str, Place]:
    return name, Place(name, processes, overrides)


WRAPS_MODEL = ("strategy=fsdp", "strategy.shard=grad_op", "strategy.wrap=model")

PLACES = dict(
    [
        _place("single", 1, "strategy=single"),
        _place("dp", 1, "strategy=dp"),
        *(_place(f"ddp{n}", n, "strategy=ddp") for n in (1, 2, 3, 4)),
        *(_place(f"fsdp{n} full", n, "strategy=fsdp") for n in (1, 2, 3, 4)),
        *(
            _place(f"fsdp{n} grad_op", n, "strategy=fsdp", "strategy.shard=grad_op")
            for n in (1, 2, 3, 4)
        ),
        _place("fsdp2 wrap=model", 2, *WRAPS_MODEL),
        # Copies of the model x processes that share one.
        _place("hsdp 2x1", 2, "strategy=hsdp", "strategy.shard_processes=1"),
        _place("hsdp 1x3", 3, "strategy=hsdp", "strategy.shard_processes=3"),
        _place("hsdp 2x2", 4, "strategy=hsdp", "strategy.shard_processes=2"),
    ]
)


@dataclass(frozen=True)
class Cell:
    """One run of the table."""

    model: str
    place: Place
    accumulation: int
    """Forward passes of a process in one full step."""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.place.name}, accumulation {self.accumulation}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """What differs from the reference."""
        return (*self.place.overrides, *self._micro)

    @property
    def reference(self) -> tuple[str, ...]:
        """Changes of the run of one process that this one must equal.

        BatchNorm sees micro-batches: its run is the same for the same micro-batch alone. Without
        BatchNorm one run stands for all.
        """
        return self._micro if self.model == "resnet" else ()

    @property
    def _micro(self) -> tuple[str, ...]:
        if self.model == "vit" and self.accumulation == 1:
            return ()  # each process's whole slice
        chunks = self.accumulation * self.place.processes
        return (f"batch.micro={-(-GLOBAL // chunks)}",)


CELLS = [
    Cell(model, place, accumulation)
    for model in MODELS
    for place in PLACES.values()
    for accumulation in (1, 3)
    # The others of one process are references themselves.
    if place.name != "single" or (model, accumulation) == ("vit", 3)
]


LONG = ("batch.global=30", "batch.micro=5", "epochs=3")
"""Windows of 30, 30 and 4 images; nine steps. Two processes accumulate three forward passes."""


@dataclass(frozen=True)
class Chain:
    """A run that is stopped in the middle of epochs, and gone on with elsewhere."""

    model: str
    places: tuple[str, ...]
    stops: tuple[int, ...] = (2, 4, 7)
    """Steps after which it stops; the last place goes on to the end."""

    @property
    def name(self) -> str:
        return f"{self.model}, {', then '.join(self.places)}"


CHAINS = [
    Chain(model, places)
    for model in MODELS
    for places in (
        ("ddp2", "fsdp4 full", "single", "hsdp 2x2"),
        ("hsdp 2x2", "dp", "fsdp3 grad_op", "ddp4"),
    )
]


class Trainer:
    """Trains configurations in turn on a pool of processes; each run in a folder of its own."""

    def __init__(self, pool: Any, data: Path, folder: Path) -> None:
        self._pool = pool
        self._data = data
        self.folder = folder
        self._trained: set[str] = set()

    def __call__(self, name: str, processes: int, *overrides: str) -> Path:
        """Train unless this trainer has done so; returns the run folder."""
        if name not in self._trained:
            self.start(name, processes, *overrides)
            self._trained.add(name)
        return self.folder / name

    def start(
        self,
        name: str,
        processes: int,
        *overrides: str,
        stop: StopRequest | None = None,
    ) -> list[dict[str, Any] | None]:
        """Train, or go on; returns each rank's summary, None when stopped."""
        place = (f"data.root={self._data}", f"launch.processes={processes}")
        config = configure(*BASE, *place, *overrides)
        run_dir = self.folder / name
        run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, run_dir / "config.yaml")
        arguments = (config, _plan(config), run_dir, stop or NeverStop())
        return list(self._pool(processes, train_one_rank, *arguments))

    def cell(self, cell: Cell) -> Path:
        """The run of a cell."""
        return self(cell.name, cell.place.processes, *MODELS[cell.model], *cell.overrides)

    def chain(self, chain: Chain) -> Path:
        """The run of a chain."""
        for place, stop_at in zip(map(PLACES.get, chain.places), (*chain.stops, None), strict=True):
            assert place is not None
            options = (*MODELS[chain.model], *LONG, *place.overrides)
            stop = () if stop_at is None else (f"stop_at={stop_at}",)
            summaries = self.start(chain.name, place.processes, *options, *stop)
            assert all((summary is None) == bool(stop) for summary in summaries)
        return self.folder / chain.name

    def reference(self, model: str, *changes: str) -> Path:
        """The run of one process that was never interrupted."""
        name = " ".join([model, "reference", *changes])
        return self(name, 1, *MODELS[model], "strategy=single", *changes)


def write_data(root: Path) -> Path:
    """The images of all these runs."""
    return write_few_digits(root, train=TRAIN, val=VAL, classes=NUM_CLASSES)


def check_same_run(run: Path, other: Path, tolerance: float = EXACT) -> None:
    """By the public judge, and by what it might overlook."""
    found = compare_runs(run, other, tolerance=tolerance)
    assert found.parting is None, found.text()
    steps, expected = records(run, "step"), records(other, "step")
    for key in ("step", "epoch", "samples_seen", "sample_digest"):
        assert [s[key] for s in steps] == [s[key] for s in expected], key
    for key in ("lr", "loss", "grad_norm"):
        figures = pytest.approx([s[key] for s in expected], rel=tolerance)
        assert [s[key] for s in steps] == figures, key
    evaluations, expected = records(run, "eval"), records(other, "eval")
    for key in ("step", "weights", "count"):
        assert [e[key] for e in evaluations] == [e[key] for e in expected], key
    weights, expected_weights = (load_file(r / "model.safetensors") for r in (run, other))
    torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-4)


def configure(*overrides: str) -> Config:
    """What ``train.py`` would make of these overrides; Hydra sees only what it must, and once."""
    groups = tuple(o for o in overrides if o[0] in "+~" or _is_group(o.partition("=")[0]))
    keys = [o for o in overrides if o not in groups]
    return bind(OmegaConf.merge(_composed(groups), OmegaConf.from_dotlist(keys)))


def _plan(config: Config) -> Plan:
    """As ``prepare`` makes it; what takes long is counted once."""
    data = data_facts(config.data, may_be_absent=False)
    size = config.model.image_size or config.data.image_size
    return make_plan(config, CPU, data, _counted(config.model.model_dump_json(), size))


@cache
def _counted(model: str, image_size: int) -> ModelFacts:
    return count(Model.model_validate_json(model), image_size=image_size, num_classes=NUM_CLASSES)


@cache
def _composed(overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return compose("config", list(overrides))


def _is_group(key: str) -> bool:
    return (REPOSITORY / "conf" / key).is_dir()
