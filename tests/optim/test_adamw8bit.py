"""AdamW with moments of 8 bits: the same run under DDP, resumed or not; refused where it is not."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from lockstep.checkpoint.shards import INDEX, read_full
from lockstep.config.bind import save_config
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.optim.build import build_optimizer
from lockstep.telemetry.compare import compare_runs
from tests.runs import configure, plan_of, train_one_rank
from tests.toys import optimizer_config

OPTIONS = ["model=vit_tiny", "+model.kwargs.depth=1", "+model.kwargs.embed_dim=64",
           "+model.kwargs.num_heads=2", "data.image_size=16", "data.num_classes=4",
           "data.workers=1", "device=cpu", "batch.global=20", "batch.micro=5", "steps=6",
           "optimizer.name=adamw8bit", "schedule.warmup_epochs=0", "telemetry.console=false",
           "checkpoint.every_epochs=null", "evaluate.every_epochs=null"]  # fmt: skip


def eager_rank(config: Config, run: Path) -> dict[str, Any] | None:
    """Train as one rank; torchao compiles its update, which takes longer than all of it."""
    if os.environ.get("RANK", "0") == "0":
        save_config(config, run / "config.yaml")
    with torch.compiler.set_stance("force_eager"):
        return train_one_rank(config, plan_of(config), run)


def test_the_run_is_the_same(pool: Any, few_digits: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="pip install -e '.[adamw8bit]'")
    alone, moved = tmp_path / "alone", tmp_path / "moved"
    single = configure(*OPTIONS, f"data.root={few_digits}", "strategy=single")
    ddp = configure(*OPTIONS, f"data.root={few_digits}", "strategy=ddp", "launch.processes=2")
    for folder in (alone, moved):
        folder.mkdir()
    pool(1, eager_rank, single, alone)
    pool(2, eager_rank, ddp.model_copy(update={"stop_at": 3}), moved)
    saved = read_full(
        checkpoint := moved / "checkpoints/step-3",
        [p.name for p in checkpoint.iterdir() if p.name != INDEX],
    )["optimizer"]
    codes = saved["state.blocks.0.attn.qkv.weight.exp_avg.codes"]
    assert codes.dtype == torch.uint8 and codes.shape == (192, 64) and codes.any()
    pool(1, eager_rank, single, moved)
    # A moment that falls to the next code moves a weight a little.
    found = compare_runs(alone, moved, tolerance=1e-3)
    assert found.parting is None, found.text()


def test_refused_under_fsdp() -> None:
    config = configure("optimizer.name=adamw8bit", "strategy=fsdp", "launch.processes=2")
    with pytest.raises(UserError, match="adamw8bit with strategy=fsdp: its blocks of 256"):
        plan_of(config.model_copy(update={"plan": True}))


def test_refused_without_torchao() -> None:
    with (
        patch.dict(sys.modules, {"torchao": None, "torchao.optim": None}),
        pytest.raises(UserError, match=r"adamw8bit needs torchao .*\.\[adamw8bit\]"),
    ):
        build_optimizer(nn.Linear(2, 2), optimizer_config("adamw8bit"), no_decay=set(), fused=False)
