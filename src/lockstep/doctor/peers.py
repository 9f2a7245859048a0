"""The same training as others would write it: the same model, batch and optimiser.

Each gives a function that trains one step. With several processes they are DistributedDataParallel.
All of them let cuDNN choose its algorithms by measurement, as timm's train.py does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import NativeScaler, dispatch_clip_grad
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep import dist
from lockstep.config.plan import Plan
from lockstep.config.schema import Config, Optimizer
from lockstep.doctor.synthetic import images_and_targets
from lockstep.models.build import create, no_decay_names
from lockstep.optim.build import build_optimizer
from lockstep.strategy.precision import autocast, set_matmul_precision

Step = Callable[[], None]


def timm_way(config: Config, plan: Plan, device: torch.device) -> Step:
    """What timm's train.py does with ``--amp --amp-dtype --channels-last --torchcompile``."""
    _set_backends(config)
    model = _wrapped(_model(config, plan, device), device)
    model = torch.compile(model, backend="inductor")  # type: ignore[assignment]
    cfg, images, targets = config.optimizer, *_batch(config, plan, device)
    optimizer = create_optimizer_v2(
        model, opt=cfg.name, lr=cfg.lr, weight_decay=cfg.weight_decay, **_arguments(cfg)
    )
    smoothing = config.augment.label_smoothing
    loss_fn: nn.Module = nn.CrossEntropyLoss()
    if targets.is_floating_point():
        loss_fn = SoftTargetCrossEntropy()
    elif smoothing:
        loss_fn = LabelSmoothingCrossEntropy(smoothing=smoothing)
    scaler = NativeScaler(device=device.type) if config.precision.name == "fp16" else None
    parameters = list(model.parameters())

    def step() -> None:
        with autocast(config.precision, device):
            loss = loss_fn(model(images), targets)
        if scaler is not None:
            scaler(loss, optimizer, clip_grad=cfg.clip_grad_norm, parameters=parameters)
        else:
            loss.backward()
            if cfg.clip_grad_norm is not None:
                dispatch_clip_grad(parameters, value=cfg.clip_grad_norm)
            optimizer.step()
        optimizer.zero_grad()

    return step


def _plain(config: Config, plan: Plan, device: torch.device, *, compiled: bool) -> Step:
    """Plain PyTorch: autocast, channels_last, fused optimiser."""
    _set_backends(config)
    network = _model(config, plan, device)
    cfg, images, targets = config.optimizer, *_batch(config, plan, device)
    fused = {"fused": True} if cfg.name.lower() in ("sgd", "adam", "adamw") else {}
    if device.type == "cuda":
        cfg = cfg.model_copy(update={"kwargs": cfg.kwargs | fused})
    optimizer = build_optimizer(network, cfg, no_decay=no_decay_names(network), fused=False)
    model = _wrapped(network, device)
    if compiled:
        model = torch.compile(model)  # type: ignore[assignment]
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision.name == "fp16")
    parameters = list(network.parameters())

    def step() -> None:
        with autocast(config.precision, device):
            logits = model(images)
            loss = F.cross_entropy(logits, targets, label_smoothing=config.augment.label_smoothing)
        scaler.scale(loss).backward()
        if cfg.clip_grad_norm is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, cfg.clip_grad_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def _set_backends(config: Config) -> None:
    set_matmul_precision(config.precision)
    torch.backends.cudnn.benchmark = True


def _model(config: Config, plan: Plan, device: torch.device) -> nn.Module:
    model = create(config.model, plan.image_size, plan.data.num_classes, meta=False).to(device)
    if config.model.activation_checkpointing:
        model.set_grad_checkpointing(True)  # type: ignore[operator]  # as timm's train.py does
    return model.to(memory_format=torch.channels_last) if device.type == "cuda" else model


def _batch(config: Config, plan: Plan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return images_and_targets(config, plan, plan.global_batch // plan.world_size, device)


def _wrapped(model: nn.Module, device: torch.device) -> nn.Module:
    if not dist.is_distributed():
        return model
    return DistributedDataParallel(model, [device.index] if device.type == "cuda" else None)


def _arguments(cfg: Optimizer) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in cfg.kwargs.items()}


PEERS: dict[str, Callable[[Config, Plan, torch.device], Step]] = {
    "plain eager": partial(_plain, compiled=False),
    "plain compile": partial(_plain, compiled=True),
    "timm": timm_way,
}
