"""Stochastic depth that depends on the sample, not on the rank, batch or order of computation.

timm's DropPath draws from the global generator, so the same sample is dropped differently on two
GPUs than on one. Here the decision is a hash of the sample's seed and the layer's number.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import DropPath
from torch import nn

_MASK = 0xFFFFFFFF
_TABLE, _NUMBERS = "drop_path_keep_and_scale", "drop_path_layers"
_MULTIPLIER = 0x45D9F3B  # 27 bits: times 32 bits stays below 2**63, so nothing overflows


def hash_uniform(seeds: torch.Tensor, salt: torch.Tensor | int) -> torch.Tensor:
    """Uniform numbers in [0, 1) from non-negative integers.

    Args:
        seeds: int64, non-negative.
        salt: which of a sample's numbers this is; broadcast with ``seeds``.

    Returns:
        float32, a pure function of the arguments on every device.
    """
    x = (seeds ^ (seeds >> 32)) & _MASK
    x = (x + salt * 0x9E3779B9) & _MASK
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _MULTIPLIER) & _MASK
    x = x ^ (x >> 16)
    return (x >> 8).float() * 2.0**-24


class SampleDropPath(nn.Module):
    """Drop-in for timm's DropPath (Huang et al. 2016, arXiv:1603.09382).

    Holds nothing that tells one layer from another: blocks that are alike share a compiled graph.
    """

    factor: torch.Tensor | None = None
    """[n] float32, what to multiply each sample's residual by in this forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, ...]; a dropped sample's residual is zero."""
        if not self.training:
            return x
        assert self.factor is not None, "the model was called without seeds"
        return x * self.factor.to(x.dtype).view(-1, *[1] * (x.ndim - 1))


def seed_by_sample(model: nn.Module) -> None:
    """Replace every DropPath of ``model`` and let its forward take ``seeds=[n] int64``.

    The seeds travel as an argument so that DataParallel scatters them with the images.
    """
    keep, scale = [], []
    for parent in list(model.modules()):
        # By attribute, not by named_children: that leaves out a second name of the same child.
        for name, child in list(parent._modules.items()):
            if not isinstance(child, DropPath):
                continue
            kept = 1.0 - float(child.drop_prob or 0.0)
            if kept == 1.0:
                setattr(parent, name, nn.Identity())
                continue
            setattr(parent, name, SampleDropPath())
            keep.append(kept)
            scale.append(1.0 / kept if child.scale_by_keep and kept > 0.0 else 1.0)
    if keep:
        table = torch.tensor([keep, scale])
        model.register_buffer(_TABLE, table, persistent=False)
        # Loaded, not counted in the graph: compiled code may count in 32 bits and overflow.
        numbers = torch.arange(len(keep))
        model.register_buffer(_NUMBERS, numbers, persistent=False)
    model.register_forward_pre_hook(_hand_out_factors, with_kwargs=True)


def _hand_out_factors(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All layers' decisions at once: a few small kernels, not a few for each layer."""
    seeds = kwargs.pop("seeds", None)
    # Looked up in each call: under DataParallel `module` is a replica with children of its own.
    layers = [child for child in module.modules() if isinstance(child, SampleDropPath)]
    if layers and seeds is not None and module.training:
        keep, scale = getattr(module, _TABLE)[:, :, None]
        numbers = getattr(module, _NUMBERS)
        assert len(numbers) == len(layers)
        factors = (hash_uniform(seeds[None], numbers[:, None]) < keep) * scale
        for layer, factor in zip(layers, factors.unbind(), strict=True):
            layer.factor = factor
    return args, kwargs
