"""Layers that compute the same in less time, for compiled models. Level 2.

What costs time in a compiled network on a fast GPU, apart from its matrix products: convolutions
over the three channels of an image, for which there are no good kernels, and the error function.
Each layer here has the parameters of the one it replaces, under the same names, and differs from it
in the last bits of its sums. Written in torch's operations, so that the compiler fuses them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from timm.layers.activations import GELU as TimmGELU
from torch import nn

_FEW_CHANNELS = 4
_ALIGNED_CHANNELS = 8
"""Tensor cores take so many channels of two bytes at once."""

# Abramowitz & Stegun 1964, "Handbook of Mathematical Functions", 7.1.26: |error| < 1.5e-7.
_P = 0.3275911 / math.sqrt(2.0)
_COEFFICIENTS = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def speed_up(part: nn.Module) -> None:
    """Replace what is slow in a module that will be compiled, in place."""
    for layer in part.modules():
        if type(layer) in (nn.GELU, TimmGELU) and getattr(layer, "approximate", "none") == "none":
            layer.__class__ = FastGELU
        elif type(layer) is nn.Conv2d and _is_over_pixels(layer):
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


class FastGELU(nn.Module):
    """The exact GELU (Hendrycks & Gimpel 2016, arXiv:1606.08415) to 1.5e-7 of the input.

    The compiler's error function takes longer than reading and writing what it is applied to. Here
    one exponential serves the function and its derivative.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: any shape and floating type; float32 within."""
        x = input.float()
        fixed = x.detach()
        bell = torch.exp(-0.5 * fixed * fixed)
        t = 1.0 / (1.0 + _P * fixed.abs())
        series = torch.zeros_like(t)
        for coefficient in reversed(_COEFFICIENTS):
            series = (series + coefficient) * t
        tail = 0.5 * series * bell
        below = torch.where(fixed >= 0, 1.0 - tail, tail)
        slope = below + fixed * bell * (1.0 / math.sqrt(2.0 * math.pi))
        # The second term is zero, and brings the gradient. An autograd.Function would say it more
        # plainly, but keeps DDP's gradients from being sent while others are computed.
        return (fixed * below + (x - fixed) * slope).to(input.dtype)
