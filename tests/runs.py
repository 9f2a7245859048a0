"""Small but whole runs: a configuration from ``conf/``, few real images, training in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from lockstep import worker
from lockstep.config.bind import bind
from lockstep.config.plan import Machine, Plan
from lockstep.config.schema import Config
from lockstep.engine.loop import StopRequest
from lockstep.errors import Stopped
from lockstep.launch.prepare import prepare
from tests.conftest import REPOSITORY

CPU = Machine(num_gpus=0, cores=1, gpu_memory_bytes=None)


class NeverStop:
    requested: str | None = None
    regroup = False


def configure(*overrides: str) -> Config:
    """What ``train.py`` would make of these overrides."""
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return bind(compose("config", list(overrides)))


def write_few_digits(root: Path, *, train: int, val: int, classes: int) -> Path:
    """Some of the handwritten digits as an ImageFolder; returns ``root``."""
    from lockstep.data.digits import digit_files  # needs scikit-learn, which GPU machines may lack

    left = {"train": train, "val": val}
    for path, data in sorted(digit_files().items(), key=lambda item: Path(item[0]).name):
        split, label, _ = path.split("/")
        if int(label) < classes and left[split]:
            left[split] -= 1
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
    return root


def train_one_rank(
    config: Config, plan: Plan, run_dir: Path, stop: StopRequest | None = None
) -> dict[str, Any] | None:
    """Train as the rank that the environment describes: DONE's summary, or None when stopped."""
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        return worker.run(config, plan, run_dir, stop or NeverStop())
    except Stopped:
        return None


def plan_of(config: Config, machine: Machine = CPU) -> Plan:
    return prepare(config, machine)


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """The lines of one kind in ``metrics.jsonl``."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]
