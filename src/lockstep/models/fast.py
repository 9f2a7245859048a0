"""Layers that compute the same in less time, for compiled models. Level 2.

There are no good kernels for convolutions over the three channels of an image. Each layer here has
the parameters of the one it replaces, under the same names, and differs from it in the last bits of
its sums. Written in torch's operations, so that the compiler fuses them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.machine import cache_folder
from lockstep.models.attention import speed_up_attention
from lockstep.models.build import blocks
from lockstep.models.join import JoinGradients
from lockstep.models.mlp import speed_up_mlps
from lockstep.models.norms import speed_up_norms
from lockstep.models.vit import speed_up_blocks

_WHOLE_UP_TO = 16
"""Blocks of a network that is compiled in one piece."""
_FEW_CHANNELS = 4
_ALIGNED_CHANNELS = 8
"""Tensor cores take so many channels of two bytes at once."""


def compile_in_place(
    model: nn.Module, mode: str, *, by_block: bool, ours: bool, norms: bool
) -> None:
    """Compile without changing names: as a whole, or deep networks block by block.

    Blocks of one shape are compiled once then; only what lies between them is lost to the compiler.

    Args:
        mode: of the key ``compile``, not ``off``.
        by_block: in any case (FSDP's hooks lie between blocks).
        ours: with our own kernels. Not where DistributedDataParallel splits the graph, which it
            cannot within their functions.
        norms: of these, BatchNorm's, too. Not where its statistics are synchronised, nor where passes
            are not recorded: there are three for each layer, and to launch them one by one from
            Python takes longer than they save.
    """
    # What was compiled is kept, and not in /tmp, which the next start of the machine empties.
    with suppress(RuntimeError):  # no home
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "compiled"))
    _tell_cache_of_kernels()
    # Blocks of one class share a cache, in which each shape and mode takes a place.
    torch._dynamo.config.recompile_limit = 64
    options: dict[str, Any] = {"max_autotune": True} if mode == "max" else {}
    if ours:
        options["post_grad_custom_pre_pass"] = JoinGradients()
    by_block = by_block or _is_deep(model)
    for part in _parts(model) if by_block else [model]:
        speed_up(part)
        if ours:
            speed_up_mlps(part)
            speed_up_blocks(part)
            speed_up_attention(part)
        if ours and norms:
            speed_up_norms(part)
        # Blocks differ in shape, which must not be taken for one graph of dynamic shapes: that is
        # slower, and inductor fails on BatchNorm's.
        part.compile(dynamic=False if by_block else None, options=options or None)


def _tell_cache_of_kernels() -> None:
    """How much room kernels need is no part of a graph: a changed one must not meet an old graph."""
    config = torch.compiler.config
    files = sorted(str(path) for path in Path(__file__).parent.glob("*.py"))
    tag = get_hash_for_files(tuple(files)).hex()[:16]
    if not config.cache_key_tag.endswith(tag):
        config.cache_key_tag += tag


def _is_deep(model: nn.Module) -> bool:
    """Whether compiling it as a whole takes minutes. Not with BatchNorm: blocks differ in shape."""
    several = len(blocks(model)) > _WHOLE_UP_TO
    return several and not any(isinstance(m, _BatchNorm) for m in model.modules())


def _parts(model: nn.Module) -> list[nn.Module]:
    """Blocks, and the stem where it is a module of several layers (ViT's patch embedding)."""
    found = blocks(model)
    inside = {id(m) for block in found for m in block.modules()}
    stems = [
        child
        for child in model.children()
        if sum(1 for _ in child.modules()) > 1 and not any(id(m) in inside for m in child.modules())
    ]
    return [*(stem for stem in stems if any(True for _ in stem.parameters())), *found]


def speed_up(part: nn.Module) -> None:
    """Replace what is slow in a module that will be compiled, in place."""
    for layer in part.modules():
        if type(layer) is nn.Conv2d and _is_over_pixels(layer):
            if layer.kernel_size == layer.stride and layer.padding == (0, 0):
                layer.__class__ = PatchConv
            elif layer.stride == (2, 2) and _keeps_place(layer):
                layer.__class__ = StemConv


def _is_over_pixels(layer: nn.Conv2d) -> bool:
    return (
        layer.in_channels <= _FEW_CHANNELS
        and layer.groups == 1
        and layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
    )


def _keeps_place(layer: nn.Conv2d) -> bool:
    """Whether the kernel is square, of odd size, and centred on the pixel."""
    size = layer.kernel_size[0]
    return layer.kernel_size == (size, size) and layer.padding == (size // 2,) * 2 and size % 2 == 1


class PatchConv(nn.Conv2d):
    """A convolution whose patches do not overlap, as one matrix product."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [n, c, h, w]; what is left at the edges of the last patches is not seen."""
        (height, width), weight = self.kernel_size, self.weight
        n, c, h, w = input.shape
        rows, columns = h // height, w // width
        patches = input[:, :, : rows * height, : columns * width]
        patches = patches.reshape(n, c, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        output = F.linear(patches.reshape(n, rows, columns, -1), weight.flatten(1), self.bias)
        return output.permute(0, 3, 1, 2)


class StemConv(nn.Conv2d):
    """A centred convolution of stride 2, as one of stride 1 over blocks of two by two pixels.

    The blocks have four times the channels, which tensor cores need, and the kernel, with a row and
    a column of zeros, half the side.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [n, c, h, w]."""
        n, c, h, w = input.shape
        if h % 2 or w % 2:
            return super().forward(input)
        before, after = _block_padding(self.kernel_size[0])
        odd = self.kernel_size[0] // 2 % 2
        weight = F.pad(self.weight, (odd, 1 - odd) * 2)
        taps, spare = weight.shape[2] // 2, -4 * c % _ALIGNED_CHANNELS
        weight = weight.view(-1, c, taps, 2, taps, 2).permute(0, 1, 3, 5, 2, 4)
        blocks = input.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
        blocks = blocks.reshape(n, 4 * c, h // 2, w // 2)
        blocks = F.pad(blocks, (before, after, before, after, 0, spare))
        weight = F.pad(weight.reshape(-1, 4 * c, taps, taps), (0, 0, 0, 0, 0, spare))
        layout = torch.channels_last
        return F.conv2d(
            blocks.contiguous(memory_format=layout),
            weight.contiguous(memory_format=layout),
            self.bias,
        )


def _block_padding(size: int) -> tuple[int, int]:
    """Blocks of zeros before and after, for a kernel of odd size."""
    before = (size // 2 + 1) // 2
    return before, (size + 1) // 2 - 1 - before
