"""Parameter groups and optimisers by name."""

from __future__ import annotations

import difflib
from typing import Any

import timm.optim
import torch
from torch import nn

from lockstep.config.schema import Optimizer
from lockstep.errors import UserError


def parameter_groups(
    model: nn.Module, cfg: Optimizer, no_decay: set[str]
) -> list[dict[str, Any]]:
    """Two groups: parameters with weight decay and, unless asked for, biases and norms without.

    Args:
        no_decay: names that the architecture excludes.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = {
        n for n, p in named if not cfg.decay_bias_and_norm and (p.ndim <= 1 or n in no_decay)
    }
    groups = [
        {"params": [p for n, p in named if n not in plain], "weight_decay": cfg.weight_decay},
        {"params": [p for n, p in named if n in plain], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def build_optimizer(
    model: nn.Module, cfg: Optimizer, *, no_decay: set[str], fused: bool
) -> torch.optim.Optimizer:
    """``sgd``, ``adamw`` or any class of torch.optim by name in any case, else timm's.

    Args:
        fused: use the fused kernel where the optimiser has one (CUDA).

    Raises:
        UserError: unknown name, or arguments that the optimiser refuses.
    """
    groups = parameter_groups(model, cfg, no_decay)
    kwargs = {k: tuple(v) if isinstance(v, list) else v for k, v in cfg.kwargs.items()}
    classes = _torch_optimizers()
    cls = classes.get(cfg.name.lower())
    try:
        if cls is not None:
            # FSDP's DTensors have no fused SGD kernel; Adam's work.
            if fused and cls in (torch.optim.Adam, torch.optim.AdamW):
                kwargs.setdefault("fused", True)
            return cls(groups, lr=cfg.lr, **kwargs)  # type: ignore[call-arg]
        if cfg.name.lower() not in timm.optim.list_optimizers():
            names = sorted({*classes, *timm.optim.list_optimizers()})
            close = difflib.get_close_matches(cfg.name.lower(), names, n=3)
            hint = f"did you mean {', '.join(close)}?" if close else f"one of {', '.join(names)}"
            raise UserError(f"optimizer.name = {cfg.name}: neither torch nor timm has it; {hint}")
        return timm.optim.create_optimizer_v2(
            groups, opt=cfg.name.lower(), lr=cfg.lr, weight_decay=cfg.weight_decay, **kwargs
        )
    except (TypeError, ValueError) as exc:
        raise UserError(f"optimizer.name = {cfg.name} with {kwargs}: {exc}") from exc


def _torch_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    # LBFGS wants a closure and SparseAdam sparse gradients: neither fits a training step.
    left_out = ("Optimizer", "LBFGS", "SparseAdam")
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and name not in left_out
    }
