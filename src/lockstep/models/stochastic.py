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
_MULTIPLIER = 0x45D9F3B  # 27 bits: times 32 bits stays below 2**63, so nothing overflows


def hash_uniform(seeds: torch.Tensor, salt: int) -> torch.Tensor:
    """Uniform numbers in [0, 1) from non-negative integers.

    Args:
        seeds: [n] int64, non-negative.
        salt: which of a sample's numbers this is.

    Returns:
        [n] float32, a pure function of the arguments on every device.
    """
    x = (seeds ^ (seeds >> 32)) & _MASK
    x = (x + salt * 0x9E3779B9) & _MASK
    for _ in range(2):
        x = ((x ^ (x >> 16)) * _MULTIPLIER) & _MASK
    x = x ^ (x >> 16)
    return (x >> 8).float() * 2.0**-24


class SampleDropPath(nn.Module):
    """Drop-in for timm's DropPath (Huang et al. 2016, arXiv:1603.09382) with per-sample seeds."""

    seeds: torch.Tensor | None

    def __init__(self, drop_prob: float, scale_by_keep: bool, layer: int) -> None:
        super().__init__()
        self.keep = 1.0 - drop_prob
        self.scale = 1.0 / self.keep if scale_by_keep and self.keep > 0 else 1.0
        self.layer = layer
        self.seeds = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, ...]; a dropped sample's residual is zero."""
        if not self.training or self.keep == 1.0:
            return x
        assert self.seeds is not None, "the model was called without seeds"
        kept = (hash_uniform(self.seeds, self.layer) < self.keep).to(x.dtype) * self.scale
        return x * kept.view(-1, *[1] * (x.ndim - 1))


def seed_by_sample(model: nn.Module) -> None:
    """Replace every DropPath of ``model`` and let its forward take ``seeds=[n] int64``.

    The seeds travel as an argument so that DataParallel scatters them with the images.
    """
    layer = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, DropPath):
                drop_prob = float(child.drop_prob or 0.0)
                setattr(parent, name, SampleDropPath(drop_prob, child.scale_by_keep, layer))
                layer += 1
    model.register_forward_pre_hook(_hand_out_seeds, with_kwargs=True)


def _hand_out_seeds(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    seeds = kwargs.pop("seeds", None)
    # Looked up in each call: under DataParallel `module` is a replica with children of its own.
    for child in module.modules():
        if isinstance(child, SampleDropPath):
            child.seeds = seeds
    return args, kwargs
