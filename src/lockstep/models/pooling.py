"""BatchNorm, ReLU and max-pooling after it, as one operator each way. Level 2.

What pooling leaves out is neither written nor read.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from lockstep.models.tile import wide

_BLOCK = 512


@torch.library.custom_op("lockstep::norm_max_pool", mutates_args=(), device_types="cuda")
def norm_max_pool(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest ReLU((x - mean) scale + bias) of the 3 x 3 pixels around every second one.

    Args:
        x: [n, c, h, w], channels last. mean, scale, bias: [c] float32.

    Returns:
        [n, c, (h + 1) / 2, (w + 1) / 2] each, channels last: that; which of the pixels it is, counted
        by rows, int8, 9 where none is positive; its x.
    """
    from lockstep.models.kernels import norm_max_pool_kernel

    n, c, h, w = x.shape
    out, places, chosen = _pooled(x)
    high, across = out.shape[2], out.shape[3] * c
    norm_max_pool_kernel[n * high, -(-across // _BLOCK)](
        x, mean, scale, bias, out, places, chosen, h, w, c, high, across, BLOCK=_BLOCK
    )
    return out, places, chosen


@norm_max_pool.register_fake
def _pooled(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n, c, h, w = x.shape
    size = (n, c, (h + 1) // 2, (w + 1) // 2)
    out, places, chosen = (
        torch.empty(size, dtype=dtype, device=x.device, memory_format=torch.channels_last)
        for dtype in (x.dtype, torch.int8, x.dtype)
    )
    return out, places, chosen


@norm_max_pool.register_kernel("cpu")
def _(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    w = x.shape[3]
    planes = (x.float() - wide(mean)) * wide(scale) + wide(bias)
    most, at = F.max_pool2d(planes, 3, 2, 1, return_indices=True)
    i = torch.arange(most.shape[2])[:, None]
    j = torch.arange(most.shape[3])[None, :]
    places = torch.where(most <= 0, 9, (at // w - 2 * i + 1) * 3 + at % w - 2 * j + 1)
    chosen = x.flatten(2).gather(2, at.flatten(2)).view(at.shape)
    out, where, of = _pooled(x)
    return out.copy_(most.relu()), where.copy_(places), of.copy_(chosen)


@torch.library.custom_op("lockstep::norm_max_pool_backward", mutates_args=(), device_types="cuda")
def norm_max_pool_backward(
    gradient: torch.Tensor,
    places: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    slope: torch.Tensor,
) -> torch.Tensor:
    """The gradient of x: (that of ReLU's input - shift - (x - mean) slope) scale.

    Args:
        gradient, places: [n, c, (h + 1) / 2, (w + 1) / 2], channels last, as :func:`norm_max_pool`'s.
        x: [n, c, h, w], channels last. mean, scale, shift, slope: [c] float32.
    """
    from lockstep.models.kernels import norm_max_pool_backward_kernel

    (n, c, h, w), (high, columns) = x.shape, gradient.shape[2:]
    out = torch.empty_like(x, memory_format=torch.channels_last)
    norm_max_pool_backward_kernel[n * high, -(-columns * c // _BLOCK)](
        gradient, places, x, mean, scale, shift, slope, out, h, w, c, high, columns * c,
        BLOCK=_BLOCK,
    )  # fmt: skip
    return out


@norm_max_pool_backward.register_fake
def _(gradient: torch.Tensor, places: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


@norm_max_pool_backward.register_kernel("cpu")
def _(
    gradient: torch.Tensor,
    places: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    slope: torch.Tensor,
) -> torch.Tensor:
    (n, c, h, w), (high, columns) = x.shape, gradient.shape[2:]
    flow = torch.zeros(n, c, 2 * high + 2, 2 * columns + 2)
    for place in range(9):
        i, j = place // 3, place % 3
        of = gradient.where(places == place, 0.0)
        flow[..., i : i + 2 * high : 2, j : j + 2 * columns : 2] += of
    flow = flow[..., 1 : h + 1, 1 : w + 1] - wide(shift)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out.copy_((flow - (x.float() - wide(mean)) * wide(slope)) * wide(scale))
