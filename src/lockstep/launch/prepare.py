"""Facts about the machine, the data and the model, and the plan made of them."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from lockstep.config.plan import DataFacts, Machine, Plan, make_plan
from lockstep.config.schema import Config, Data
from lockstep.data import open_split
from lockstep.errors import UserError
from lockstep.machine import cores, nvidia_smi
from lockstep.models.build import count
from lockstep.optim.build import build_optimizer


def machine() -> Machine:
    """Visible GPUs, their memory and links, usable cores and memory, without starting CUDA here."""
    gpus = torch.cuda.device_count()
    return Machine(
        num_gpus=gpus,
        cores=cores(),
        gpu_memory_bytes=_gpu_memory_bytes() if gpus else None,
        host_memory_bytes=_host_memory_bytes(),
        nvlink=joined_by_nvlink("\n".join(nvidia_smi("topo", "-m") or [])) if gpus > 1 else None,
        compiles=_compiles(),
    )


def prepare(config: Config, here: Machine) -> Plan:
    """Make the plan; the data set's stated sizes serve where it is only to be planned.

    Raises:
        UserError: whatever cannot run.
    """
    data = data_facts(config.data, may_be_absent=config.plan)
    size = config.model.image_size or config.data.image_size
    model = count(config.model, image_size=size, num_classes=data.num_classes)
    # What an optimiser refuses would otherwise be told by the worker, whose folder would be left.
    with torch.device("meta"):
        build_optimizer(nn.Linear(2, 2), config.optimizer, no_decay=set(), fused=False)
    plan = make_plan(config, here, data, model)
    if config.plan and not Path(config.data.root).exists():
        plan.notes.append(
            f"data.root = {config.data.root} does not exist: sizes as {config.data.name} has them"
        )
    return plan


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


def joined_by_nvlink(topology: str) -> bool | None:
    """Whether ``nvidia-smi topo -m`` shows NVLink (NV1, NV18, ...) between all pairs of GPUs."""
    # The heading may be underlined by the terminal.
    rows = [line.split() for line in re.sub(r"\x1b\[\d*m", "", topology).splitlines()]
    rows = [row for row in rows if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row]
    pairs = [cell for row in rows for cell in row[1 : len(rows) + 1] if cell != "X"]
    return all(cell.startswith("NV") for cell in pairs) if pairs else None


def _compiles() -> bool:
    """Whether Triton can build the launchers of its kernels, as its build.py looks for them."""
    headers = Path(str(sysconfig.get_config_var("INCLUDEPY"))) / "Python.h"
    compilers = ("CC" in os.environ, shutil.which("gcc"), shutil.which("clang"))
    return any(compilers) and headers.is_file()


def _host_memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # "max" where a container has no limit
        return min(physical, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return physical


def _gpu_memory_bytes() -> int | None:
    told = nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        return min(int(line) for line in told or []) * 2**20
    except ValueError:
        return None
