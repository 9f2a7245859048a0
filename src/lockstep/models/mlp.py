"""The hidden layer of a transformer's MLP in 16 bits: GELU and the bias before it as one. Level 2.

GELU by the error function takes the GPU longer than to read and write its values, and the gradient
of the bias is a sum over all of them once more. Here the normal distribution is a polynomial, off
by 1.5e-5 at most (GELU by 3.1e-5), a hundredth of what rounding to 16 bits is off near 1, and the sum
is taken where the gradients are made.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import nn

from lockstep.models.tile import (
    ALIGNED_CHANNELS,
    Tile,
    has_hooks,
    trains_in_16_bits,
)

_FORWARD = {"ROWS": 2, "CHANNELS": 1024, "TIMES": 2}
"""Of a program, of which there are as many as it takes: nothing is summed."""
_BACKWARD = Tile(rows=16, channels=128, times=1, programs=1584)
_BACKWARD_WARPS = 8
_LIMIT = 4.5
_SERIES = (
    -1.4000673450448309e-12, 1.6973036864875723e-10, -9.193747985136724e-09, 2.9588983352368814e-07,
    -6.365255558193894e-06, 9.787135786609724e-05, -0.0011226785136386752, 0.009833185002207756,
    -0.06633705645799637, 0.39888377977775574,
)  # fmt: skip
"""Of (normal distribution - 1/2) / x in x^2, the highest power first: fitted between +-4.5 so that the
largest error of x times the distribution is least."""


class FastMlp(Mlp):
    """timm's; its own way where a GPU trains with autocast to 16 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., c]."""
        output: torch.Tensor
        hooked = has_hooks(self.fc1) or has_hooks(self.act)
        if hooked or not trains_in_16_bits(self, x):
            output = super().forward(x)  # type: ignore[no-untyped-call]
            return output
        assert self.fc1.bias is not None
        hidden = bias_gelu(F.linear(x, self.fc1.weight), self.fc1.bias)
        output = self.drop2(self.fc2(self.norm(self.drop1(hidden))))
        return output


def speed_up_mlps(model: nn.Module) -> None:
    """Replace the layers of this file in a module that will be compiled, in place."""
    for layer in model.modules():
        if type(layer) is Mlp and _is_usual(layer):
            layer.__class__ = FastMlp


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU(x + bias) in the dtype of x.

    Args:
        x: [..., c]. bias: [c].
    """
    output: torch.Tensor = _BiasGelu.apply(x, bias)
    return output


def _is_usual(layer: Mlp) -> bool:
    exact = type(layer.act) is nn.GELU and layer.act.approximate == "none"
    if not exact or type(layer.fc1) is not nn.Linear or layer.fc1.bias is None:
        return False
    return layer.fc1.out_features % ALIGNED_CHANNELS == 0


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, bias)
        output: torch.Tensor = gelu(x.contiguous(), bias.float())
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, bias = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        gradient = gradient.reshape(rows.shape).contiguous()
        flow, parts = gelu_backward(gradient, rows, bias.float())
        return flow.view_as(x), parts.sum(0).to(bias.dtype)


def _below(value: torch.Tensor) -> torch.Tensor:
    """The part of a normal distribution that lies below, float32."""
    near = value.clamp(-_LIMIT, _LIMIT)
    square = near * near
    series = torch.full_like(square, _SERIES[0])
    for factor in _SERIES[1:]:
        series = series * square + factor
    far = value.abs() >= _LIMIT
    return torch.where(far, (value > 0).to(series.dtype), near * series + 0.5)


@torch.library.custom_op("lockstep::gelu", mutates_args=(), device_types="cuda")
def gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """GELU(x + bias), like x.

    Args:
        x: [..., c], contiguous. bias: [c] float32.
    """
    from lockstep.models.vit_kernels import gelu_kernel

    out, channels = torch.empty_like(x), len(bias)
    rows = x.numel() // channels
    grid = -(-rows // (_FORWARD["ROWS"] * _FORWARD["TIMES"])), -(-channels // _FORWARD["CHANNELS"])
    gelu_kernel[grid](x, bias, out, rows, channels, LIMIT=_LIMIT, SERIES=_SERIES, **_FORWARD)
    return out


@gelu.register_fake
def _(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@gelu.register_kernel("cpu")
def _(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    value = x.float() + bias
    return (value * _below(value)).to(x.dtype)


@torch.library.custom_op("lockstep::gelu_backward", mutates_args=(), device_types="cuda")
def gelu_backward(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of GELU(x + bias): [m, c] like x, and sums of parts of its rows.

    Args:
        gradient, x: [m, c]. bias: [c] float32.

    Returns:
        And [parts, c] float32.
    """
    from lockstep.models.vit_kernels import gelu_backward_kernel

    out, sums = _gradients_like(gradient, x, bias)
    _BACKWARD.launch(
        gelu_backward_kernel, gradient, x, bias, out, sums,
        rows=x, LIMIT=_LIMIT, SERIES=_SERIES, num_warps=_BACKWARD_WARPS,
    )  # fmt: skip
    return out, sums


@gelu_backward.register_fake
def _gradients_like(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), _BACKWARD.sums_like(x)


@gelu_backward.register_kernel("cpu")
def _(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    value = x.float() + bias
    density = torch.exp(-0.5 * value.square()) * 0.3989422804014327
    flow = gradient.float() * (_below(value) + value * density)
    return flow.to(x.dtype), _BACKWARD.sum_parts(flow)
