"""Facts about the machine, the data and the model, and the plan made of them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import torch

from lockstep.config.plan import DataFacts, Machine, Plan, make_plan
from lockstep.config.schema import Config, Data
from lockstep.data import open_split
from lockstep.errors import UserError
from lockstep.models.build import count


def machine() -> Machine:
    """Visible GPUs, usable cores and the memory of one GPU, without starting CUDA here."""
    gpus = torch.cuda.device_count()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(gpus, cores or 1, _gpu_memory_bytes() if gpus else None)


def prepare(config: Config, here: Machine) -> Plan:
    """Make the plan; the data set's stated sizes serve where it is only to be planned.

    Raises:
        UserError: whatever cannot run.
    """
    data = data_facts(config.data, may_be_absent=config.plan)
    size = config.model.image_size or config.data.image_size
    model = count(config.model, image_size=size, num_classes=data.num_classes)
    return make_plan(config, here, data, model)


def data_facts(cfg: Data, *, may_be_absent: bool) -> DataFacts:
    """Counted in the folder; as the data group states them where the folder may be absent.

    Raises:
        UserError: no folder, or one that cannot be trained on.
    """
    root = Path(cfg.root)
    if may_be_absent and not root.exists() and cfg.num_train and cfg.num_val and cfg.num_classes:
        return DataFacts(cfg.num_train, cfg.num_val, cfg.num_classes)
    train = open_split(cfg, "train")
    val = open_split(cfg, "val", classes=train.classes)
    if cfg.num_classes not in (None, len(train.classes)):
        raise UserError(
            f"data.num_classes = {cfg.num_classes}, but {root}/train has {len(train.classes)} "
            "class folders: set data.num_classes=null to count them"
        )
    return DataFacts(len(train), len(val), len(train.classes))


def _gpu_memory_bytes() -> int | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
