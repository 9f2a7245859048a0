"""Parameter groups and optimisers by name."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn

from lockstep.config.schema import Optimizer
from lockstep.config.sizing import ADAMW_8BIT
from lockstep.errors import UserError, refuse_argument

_UNFIT = {
    "lbfgs": "wants a closure",
    "sparseadam": "wants sparse gradients",
    "adahessian": "wants second derivatives",
    "kron": "has a state that checkpoints cannot hold",
    "kronw": "has a state that checkpoints cannot hold",
    "kronc": "has a state that checkpoints cannot hold",
}


def parameter_groups(model: nn.Module, cfg: Optimizer, no_decay: set[str]) -> list[dict[str, Any]]:
    """Two groups: parameters with weight decay and, unless asked for, biases and norms without.

    Args:
        no_decay: names that the architecture excludes.
    """
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plain = {
        n
        for n, p in named
        if not cfg.decay_bias_and_norm
        and (p.ndim <= 1 or n.rpartition(".")[2] == "bias" or n in no_decay)
    }
    groups = [
        {"params": [p for n, p in named if n not in plain], "weight_decay": cfg.weight_decay},
        {"params": [p for n, p in named if n in plain], "weight_decay": 0.0},
    ]
    return [g for g in groups if g["params"]]


def build_optimizer(
    model: nn.Module, cfg: Optimizer, *, no_decay: set[str], fused: bool
) -> torch.optim.Optimizer:
    """``sgd``, ``adamw``, any class of torch.optim by name in any case, ``adamw8bit``, else timm's.

    Args:
        fused: use the fused kernel where the optimiser has one.

    Raises:
        UserError: unknown name, or arguments that the optimiser refuses.
    """
    name = cfg.name.lower()
    cls = _adamw8bit() if name == ADAMW_8BIT else _torch_optimizers().get(name)
    if cls is None:
        _check_name(cfg.name)
    groups = parameter_groups(model, cfg, no_decay)
    kwargs: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in cfg.kwargs.items()
    }
    # FSDP's DTensors have no fused SGD kernel; Adam's work.
    another = kwargs.get("foreach") or kwargs.get("differentiable")
    if fused and not another and cls in (torch.optim.Adam, torch.optim.AdamW):
        kwargs.setdefault("fused", True)
    try:
        if cls is not None:
            return cls(groups, lr=cfg.lr, **kwargs)  # type: ignore[no-any-return]
        return create_optimizer_v2(
            groups, opt=name, lr=cfg.lr, weight_decay=cfg.weight_decay, **kwargs
        )
    # Libraries refuse arguments, and machines without what they need, in any way they like.
    except Exception as exc:
        refuse_argument(exc, "optimizer", cfg.name, cfg.kwargs)
        raise UserError(f"optimizer.name = {cfg.name} with {kwargs}: {exc}") from exc


def _adamw8bit() -> type[Any]:
    """AdamW with moments of 8 bits (Dettmers et al. 2022, arXiv:2110.02861), which torchao brings."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as exc:
        raise UserError(
            f"optimizer.name = {ADAMW_8BIT} needs torchao ({exc}): pip install -e '.[adamw8bit]'"
        ) from exc
    return AdamW8bit  # type: ignore[no-any-return]


def _check_name(name: str) -> None:
    """Refuse what timm does not know, naming similar ones, and what no training step can use."""
    lower = name.lower()
    if lower in _UNFIT:
        raise UserError(f"optimizer.name = {name} {_UNFIT[lower]}: use another, such as adamw")
    known = {str(n) for n in list_optimizers()}
    if lower in known:
        return
    names = sorted({*_torch_optimizers(), *known} - _UNFIT.keys())
    close = difflib.get_close_matches(lower, names, n=4)
    hint = f"did you mean {', '.join(close)}?" if close else f"one of {', '.join(names)}"
    raise UserError(f"optimizer.name = {name}: neither torch nor timm has it; {hint}")


def _torch_optimizers() -> dict[str, type[Any]]:
    # torch's Muon takes matrices alone; timm's of the same name takes a whole network.
    left_out = {"optimizer", "muon", *_UNFIT}
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type)
        and issubclass(cls, torch.optim.Optimizer)
        and name.lower() not in left_out
    }
