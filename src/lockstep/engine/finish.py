"""The end of a run: weights, ``DONE``, and what the user is told. Level 5."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from lockstep import dist
from lockstep.checkpoint.export import export_weights
from lockstep.checkpoint.shards import local
from lockstep.checkpoint.store import refused
from lockstep.durable import atomic_write
from lockstep.engine.loop import Training, main_result
from lockstep.engine.state import TrainState
from lockstep.errors import tell


def finish(t: Training, run_dir: Path, card: dict[str, Any]) -> dict[str, Any]:
    """Export the weights, write ``DONE`` and close telemetry. All ranks enter here.

    Args:
        card: what goes with the weights about the run's configuration.
    """
    result, progress = main_result(t.results), t.state.progress
    t.phases.enter("finish", progress.step)
    summary: dict[str, Any] = {
        "run": str(run_dir),
        "step": progress.step,
        "weights": "ema" if t.state.ema is not None else "raw",
        "top1": result.top1,
        "top5": result.top5,
        "loss": result.loss,
        "count": result.count,
        "best_top1": progress.best_top1,
        "best_step": progress.best_step,
        "left_out": left_out(t),
        "skipped_steps": progress.skipped_steps,
    }
    weights = whole_weights(t.state)

    def write() -> None:
        facts = {
            "num_classes": t.plan.data.num_classes,
            "image_size": t.plan.image_size,
            "classes": t.train_loader.source.classes,
            "metrics": summary,
            "data": t.manifest["data"],
            "gpu_share": t.manifest["gpu_share"],
            "git": t.manifest["git"],
            "versions": t.manifest["versions"],
        }
        export_weights(weights, run_dir / "model.safetensors", card=card | facts)
        with refused(run_dir):
            atomic_write(run_dir / "DONE", json.dumps(summary, indent=2).encode())

    dist.on_main(write)
    t.telemetry.close(summary)
    # The summary names files, and names may hold what the terminal cannot show.
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = told(summary).encode(encoding, "backslashreplace").decode(encoding)
    dist.on_main(lambda: tell(text, sys.stdout))
    return summary


def left_out(t: Training) -> dict[str, list[str]]:
    """Names of the unreadable images of each split, over all ranks. All ranks enter here."""
    return {
        split: sorted(
            {name for names in dist.gather_objects(list(loader.skipped)) for name in names}
        )
        for split, loader in (("train", t.train_loader), ("val", t.val_loader))
    }


def told(summary: dict[str, Any]) -> str:
    """How the run ended and what to type next."""
    run = shlex.quote(summary["run"])
    best = f" (best {summary['best_top1']:.2f} % at step {summary['best_step']})"
    missing = "".join(
        f"\n  left out  {len(names)} of {split}, unreadable: {', '.join(names[:3])}"
        + (", ... (all of them in DONE)" if len(names) > 3 else "")
        for split, names in summary["left_out"].items()
        if names
    )
    return f"""
top-1 {summary["top1"]:.2f} % of {summary["count"]:,} images{best}{missing}
  run       {run}
  evaluate  python scripts/evaluate.py {run}
  weights   {run}/model.safetensors (timm.create_model(..., checkpoint_path=...))"""


def whole_weights(state: TrainState) -> dict[str, torch.Tensor]:
    """Unsharded evaluation weights on rank 0's CPU; elsewhere empty. All ranks enter here."""
    swapped = state.ema.swapped() if state.ema is not None else nullcontext()
    with swapped, state.statistics.whole():
        state.statistics.set_batches_tracked(state.progress.micro_batches)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole: dict[str, Any] = get_model_state_dict(state.model, options=options)
        # On the CPU these are the live tensors, which change when `whole` ends.
        live = {local(tensor).data_ptr() for tensor in state.model.state_dict().values()}
        return {n: t.clone() if t.data_ptr() in live else t for n, t in whole.items()}
