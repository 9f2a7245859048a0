"""Building timm models and counting what they cost."""

from __future__ import annotations

import difflib
import logging
import os
import socket
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import urlsplit

import huggingface_hub as hub
import timm
import torch
from timm.layers import DropPath
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lockstep import dist
from lockstep.config.plan import ModelFacts
from lockstep.config.schema import Model
from lockstep.errors import UserError, refuse_argument
from lockstep.models.batchnorm import frozen
from lockstep.models.deferred import build_deferred
from lockstep.models.stochastic import seed_by_sample


def build(cfg: Model, *, image_size: int, num_classes: int, seed: int, meta: bool) -> nn.Module:
    """Build the model, the same on every rank.

    Weights are drawn on the CPU from ``seed``, so that the device changes nothing. With
    ``cfg.draw=parameter`` they are still to be drawn (models/deferred.py): strategies do it.

    Args:
        image_size: side of the input in pixels.
        num_classes: size of the head.
        meta: parameters without storage, to be filled later.

    Raises:
        UserError: unknown name, argument, size or weights that timm refuses.
    """
    check_name(cfg.name)
    _check_sources(cfg)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if cfg.draw == "parameter" and not meta and not cfg.pretrained:
            model = build_deferred(lambda: create(cfg, image_size, num_classes, meta=meta), seed)
        else:
            model = create(cfg, image_size, num_classes, meta=meta)
    if cfg.activation_checkpointing:
        _checkpoint_activations(model)
    with torch.device("meta" if meta else "cpu"):
        seed_by_sample(model)
    return model


def count(cfg: Model, *, image_size: int, num_classes: int) -> ModelFacts:
    """Count parameters, FLOPs and saved activations by one pass without data.

    Raises:
        UserError: also when the model refuses the image size.
    """
    model = build(
        cfg.model_copy(update={"pretrained": False, "activation_checkpointing": False}),
        image_size=image_size,
        num_classes=num_classes,
        seed=0,
        meta=True,
    )
    repeated = blocks(model)
    saved: dict[int, int] = {}
    inside: dict[int, int] = {}
    inputs: dict[int, int] = {}
    running = [-1]
    parameters = {id(p) for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor._base if tensor._base is not None else tensor
        if id(tensor) not in parameters and id(base) not in parameters:
            # meta storages share one address: the object stands for the memory
            saved[id(base)] = base.numel() * base.element_size()
            inside.setdefault(id(base), running[0])
            keep.append(base)
        return tensor

    def begin(number: int, given: tuple[Any, ...]) -> None:
        running[0] = number
        for tensor in given:
            if isinstance(tensor, torch.Tensor):
                inputs[id(tensor)] = tensor.numel() * tensor.element_size()
                inside[id(tensor)] = -1  # is kept, whoever saves it
                keep.append(tensor)

    def end(*_: Any) -> None:
        running[0] = -1

    keep: list[torch.Tensor] = []
    for number, block in enumerate(repeated):
        block.register_forward_pre_hook(lambda _, given, n=number: begin(n, given))
        block.register_forward_hook(end)
    # Two images, in training mode: BatchNorm refuses a single value per channel.
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    seeds = torch.empty(2, dtype=torch.int64, device="meta")
    try:
        with (
            FlopCounterMode(display=False) as flops,
            torch.autograd.graph.saved_tensors_hooks(note, lambda t: t),
        ):
            model(images, seeds=seeds)
    except (AssertionError, RuntimeError, ValueError, TypeError) as exc:
        raise UserError(
            f"data.image_size = {image_size}: {cfg.name} refuses it ({_first_line(exc)}); "
            "set model.image_size (and model.patch_size for a ViT) to sizes that fit"
        ) from exc
    of_block = [0] * len(repeated) + [0]
    for key, num_bytes in saved.items():
        of_block[inside[key]] += num_bytes
    outside = sum(n for key, n in saved.items() if inside[key] == -1 and key not in inputs)
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        forward_flops=flops.get_total_flops() // 2,
        activation_bytes=sum(saved.values()) // 2,
        has_batchnorm=any(isinstance(m, _BatchNorm) for m in model.modules()),
        checkpointed_bytes=(outside + sum(inputs.values()) + max(of_block[:-1], default=0)) // 2,
        block_parameters=max((_size(block) for block in repeated), default=0),
        blocks=len(repeated),
    )


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def check_name(name: str) -> None:
    """Refuse a name that timm does not know, naming similar ones."""
    architecture = name.split(".", 1)[0]
    if timm.is_model(name) or timm.is_model(architecture):
        return
    close = difflib.get_close_matches(name, timm.list_models(), n=3)
    hint = f"did you mean {', '.join(close)}?" if close else "see timm.list_models()"
    raise UserError(f"model.name = {name}: timm has no such model; {hint}")


def _check_sources(cfg: Model) -> None:
    """Refuse what would load files that may run code; a recipe may come from a stranger."""
    if other := sorted(k for k in cfg.kwargs if k.startswith("pretrained")):
        raise UserError(
            f"model.kwargs.{other[0]}: use model.pretrained=true, and a model.name that names the "
            "weights (timm.list_pretrained())"
        )
    path = str(cfg.kwargs.get("checkpoint_path") or "")
    if path and not path.endswith(".safetensors"):
        raise UserError(
            f"model.kwargs.checkpoint_path = {path}: must be a .safetensors file; other formats "
            "may run code when they are read"
        )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a network, outermost first met: what FSDP wraps and compile repeats.

    A block is a child of a container (a list, or a module all of whose children are alike), made
    of modules with parameters, whose class has several such children in the network: ViT's
    ``blocks.*``, ResNet's ``layer*.*``. Nested candidates belong to the outer one, unless that is
    the rarer one: a stage, which merely holds blocks.
    """
    candidates = [
        child
        for parent in model.modules()
        if _is_container(parent)
        for child in parent.children()
        if not isinstance(child, nn.Sequential | nn.ModuleList)
        and any(True for _ in child.children())
        and sum(p.numel() for p in child.parameters()) > 0
    ]
    repeated = Counter(type(c) for c in candidates)
    chosen = {id(c): c for c in candidates if repeated[type(c)] > 1}
    for stage in list(chosen.values()):
        inner = [m for m in stage.modules() if m is not stage and id(m) in chosen]
        if not inner:
            continue
        if repeated[type(inner[0])] > repeated[type(stage)]:
            chosen.pop(id(stage), None)
        else:
            for m in inner:
                chosen.pop(id(m), None)
    return list(chosen.values())


def _is_container(module: nn.Module) -> bool:
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return True
    kinds = {type(child) for child in module.children()}
    return len(kinds) == 1 and sum(1 for _ in module.children()) > 1


def no_decay_names(model: nn.Module) -> set[str]:
    """Parameters that the architecture itself excludes from weight decay (position embeddings)."""
    excluded: Callable[[], set[str]] = getattr(model, "no_weight_decay", set)
    return set(excluded())


def create(cfg: Model, image_size: int, num_classes: int, *, meta: bool) -> nn.Module:
    """timm's own model, its weights drawn from the global generator. Raises UserError."""
    kwargs: dict[str, Any] = {"num_classes": num_classes, "pretrained": cfg.pretrained}
    if cfg.drop_path:
        kwargs["drop_path_rate"] = cfg.drop_path
    if cfg.patch_size is not None:
        auto = 16 if image_size >= 64 else max(1, image_size // 4)
        kwargs["patch_size"] = auto if cfg.patch_size == "auto" else cfg.patch_size
    kwargs |= {k: tuple(v) if isinstance(v, list) else v for k, v in cfg.kwargs.items()}
    if cfg.pretrained and dist.local_rank():
        dist.barrier()  # the first process of the machine fetches, the others find the file
    try:
        model = _created(cfg, image_size, kwargs, meta=meta)
    finally:  # whatever became of it: the others wait
        if cfg.pretrained and not dist.local_rank():
            dist.barrier()
    _check_patches(model, image_size)
    if cfg.drop_path and not any(isinstance(m, DropPath) for m in model.modules()):
        raise UserError(f"model.drop_path = {cfg.drop_path}: {cfg.name} has no stochastic depth")
    return model


def _created(cfg: Model, image_size: int, kwargs: dict[str, Any], *, meta: bool) -> nn.Module:
    if cfg.pretrained:
        _check_network(cfg)
    try:
        with torch.device("meta" if meta else "cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return timm.create_model(cfg.name, img_size=image_size, **kwargs)
            except TypeError as exc:
                if "img_size" not in str(exc):
                    raise
                # Convolutional networks take any size and know no such argument.
                return timm.create_model(cfg.name, **kwargs)
    except Exception as exc:
        if cfg.pretrained:
            raise UserError(
                f"model.pretrained = true: the weights of {cfg.name} could not be fetched or do "
                f"not fit ({_first_line(exc)}); connect to the network once, or use "
                "model.pretrained=false"
            ) from exc
        refuse_argument(exc, "model", cfg.name, cfg.kwargs)
        # timm refuses arguments in any way it likes.
        raise UserError(
            f"model.name = {cfg.name} with {kwargs} at image_size = {image_size}: "
            f"{_first_line(exc)}"
        ) from exc


def _check_patches(model: nn.Module, image_size: int) -> None:
    """Refuse a size that patches do not tile: timm would drop the border pixels in silence."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    side = patch[0] if isinstance(patch, tuple) else patch
    if isinstance(side, int) and image_size % side:
        raise UserError(
            f"data.image_size = {image_size}: not a multiple of the model's patch of {side} px; "
            f"set model.image_size={max(1, round(image_size / side)) * side}, or model.patch_size"
        )


def _check_network(cfg: Model) -> None:
    """Say at once that there is no network, where the hub's client would retry for a minute."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    source = timm.get_pretrained_cfg(cfg.name)
    repo = source.hf_hub_id if source is not None else None
    names = ("model.safetensors", "pytorch_model.bin")
    if repo is None or any(hub.try_to_load_from_cache(repo, n) for n in names):
        return
    if any(v in os.environ for v in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return
    try:
        socket.getaddrinfo(urlsplit(hub.constants.ENDPOINT).hostname, 443)
    except OSError as exc:
        raise UserError(
            f"model.pretrained = true: no network to fetch the weights of {cfg.name} ({exc}); "
            "connect once, or use model.pretrained=false"
        ) from exc


def _checkpoint_activations(model: nn.Module) -> None:
    """Recompute each block in backward (non-reentrant), without changing any parameter's name."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for block in blocks(model):
        cls = type(block)
        if cls not in classes:
            # A class, not an attribute: DataParallel's copies have to recompute themselves.
            classes[cls] = type(cls.__name__, (_Recomputed, cls), {})
        block.__class__ = classes[cls]


class _Recomputed(nn.Module):
    """Mixed into the class of a block.

    What is run again lies within the block, behind the hooks of FSDP: these may cast what the block
    is given (a rope table) the first time only. timm's own checkpoints lie around the block, and
    fail where FSDP2 does so.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layers = [m for m in self.modules() if isinstance(m, _BatchNorm)]

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            # The second pass must not count the same batch again in the running statistics.
            return nullcontext(), frozen(layers)

        options: dict[str, Any] = {"context_fn": contexts} if layers else {}
        return checkpoint(super().forward, *args, use_reentrant=False, **options, **kwargs)


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).strip().splitlines()[0] if str(exc).strip() else ''}"
