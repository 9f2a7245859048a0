"""BatchNorm, ReLU and max-pooling of training, in fewer bytes than the compiler finds. Level 2.

Convolutional networks spend most of a step on reading and writing activations for BatchNorm. Here
its sums over a batch are kernels that read what they need once, and ReLU's mask is computed from
BatchNorm's input, which has to be read anyway, instead of being kept. What works value by value is
left to the compiler, which fuses it with its neighbours. Layers keep their parameters and names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

_PROGRAMS = 1056
"""Of a kernel over a batch: eight for each processor of an H100 or H200."""
ROWS, CHANNELS, TIMES = 16, 64, 4
"""Of a program: values that are read at once, and how often before they are added."""
_POOL_BLOCK = 1024
ALIGNED_CHANNELS = 16
"""Kernels would read the values of others one by one."""


class FastBatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d``, and ReLU after it where asked for."""

    relu = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [n, c, h, w]."""
        if not _is_for_us(self, input):
            output = super().forward(input)
            return F.relu(output) if self.relu else output
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        with torch.no_grad():
            count = input.numel() // self.num_features
            mean, variance = moments(input)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
            deviation = (variance + self.eps).rsqrt()
        return batch_norm(input, self.weight, self.bias, mean, deviation, relu=self.relu)


class FastMaxPool(nn.MaxPool2d):
    """``nn.MaxPool2d`` of 3 x 3 pixels around every second one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [n, c, h, w]."""
        if not _is_for_us(self, input):
            return _result(super().forward(input))
        return _result(_MaxPool.apply(input))


def _is_for_us(layer: nn.Module, input: torch.Tensor) -> bool:
    return layer.training and input.is_cuda


def speed_up_norms(model: nn.Module) -> None:
    """Replace the layers of this file in a module that will be compiled, in place."""
    for norm, owner, name in _followed_by_relu(model):
        if _is_plain(norm):
            _replace(norm, relu=True)
            setattr(owner, name, nn.Identity())
    for layer in model.modules():
        if _is_plain(layer):
            _replace(layer, relu=False)
        elif type(layer) is BatchNormAct2d and _adds_at_most_relu(layer):
            _replace(layer, relu=isinstance(layer.act, nn.ReLU))
        elif type(layer) is nn.MaxPool2d and _is_usual(layer):
            layer.__class__ = FastMaxPool


def _replace(norm: nn.Module, *, relu: bool) -> None:
    norm.__class__ = FastBatchNorm
    vars(norm)["relu"] = relu


def _is_plain(layer: nn.Module) -> bool:
    return type(layer) is nn.BatchNorm2d and _has_everything(layer)


def _has_everything(layer: nn.BatchNorm2d) -> bool:
    usual = layer.affine and layer.track_running_stats and layer.momentum is not None
    return usual and layer.num_features % ALIGNED_CHANNELS == 0


def _adds_at_most_relu(layer: BatchNormAct2d) -> bool:
    usual = type(layer.act) in (nn.ReLU, nn.Identity) and type(layer.drop) is nn.Identity
    return usual and _has_everything(layer)


def _is_usual(layer: nn.MaxPool2d) -> bool:
    sizes = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return sizes == (3, 2, 1, 1) and not layer.ceil_mode and not layer.return_indices


def _followed_by_relu(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Each norm whose output goes to a ReLU alone, the owner of that ReLU, and its name there."""
    for module in model.modules():
        pairs: list[tuple[str, str]] = []
        if isinstance(module, nn.Sequential):
            pairs = list(pairwise(module._modules))
        elif type(module) in (BasicBlock, ResNet):
            pairs = [("bn1", "act1")]
        elif type(module) is Bottleneck:
            pairs = [("bn1", "act1"), ("bn2", "act2")]
        if type(getattr(module, "drop_block", None)) not in (type(None), nn.Identity):
            continue  # lies between them
        for norm, act in pairs:
            if type(getattr(module, act)) is nn.ReLU:
                yield getattr(module, norm), module, act


# --- functions ------------------------------------------------------------------------------------


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel.

    Args:
        x: [n, c, h, w].

    Returns:
        [c] float32 each.
    """
    rows = _rows(x)
    chunk = chunk_of(rows)
    parts = batch_moments(rows, chunk)
    begins = chunk * torch.arange(len(parts), device=x.device)
    counts = (len(rows) - begins).clamp(0, chunk)[:, None]
    mean = (parts[:, 0] * counts).sum(0) / len(rows)
    # Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances".
    apart = (parts[:, 0] - mean).square() * counts
    return mean, (parts[:, 1] + apart).sum(0) / len(rows)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    *,
    relu: bool,
) -> torch.Tensor:
    """Normalised x, in its dtype; gradients are those of BatchNorm, whose moments follow from x.

    Args:
        x: [n, c, h, w]. weight, bias, mean: [c].
        deviation: [c], one by the standard deviation.
        relu: and ReLU of it.
    """
    return _result(_BatchNorm.apply(x, weight, bias, mean, deviation, relu))


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        deviation: torch.Tensor,
        relu: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias, mean, deviation)
        ctx.relu = relu
        output = (x.float() - _wide(mean)) * _wide(weight * deviation) + _wide(bias)
        return (output.relu() if relu else output).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, deviation = ctx.saved_tensors
        rows, scale = _rows(x), weight * deviation
        parts = gradient_sums(_rows(gradient), rows, mean, scale, bias, chunk_of(rows), ctx.relu)
        total, product = parts.sum(0)
        flow, centred = gradient.float(), x.float() - _wide(mean)
        if ctx.relu:
            flow = torch.where(centred * _wide(scale) + _wide(bias) > 0, flow, 0.0)
        slope = deviation.square() * product / len(rows)
        flow = (flow - _wide(total / len(rows)) - centred * _wide(slope)) * _wide(scale)
        return flow.to(x.dtype), product * deviation, total, None, None, None


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        output, places = max_pool(x.permute(0, 2, 3, 1).contiguous())
        ctx.save_for_backward(places)
        ctx.size = x.shape[2:]
        return _result(output).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (places,) = ctx.saved_tensors
        gradient = gradient.permute(0, 2, 3, 1).contiguous()
        return _result(max_pool_backward(gradient, places, *ctx.size)).permute(0, 3, 1, 2)


def _result(of_function: Any) -> torch.Tensor:
    output: torch.Tensor = of_function
    return output


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[n, c, h, w] as contiguous [n h w, c]; no copy where channels lie last."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).contiguous()


def num_parts(channels: int) -> int:
    """Into which a batch is divided; not by its size, which may be a symbol to the compiler."""
    return max(1, _PROGRAMS // -(-channels // CHANNELS))


def chunk_of(rows: torch.Tensor) -> int:
    """Rows of a part."""
    return -(-len(rows) // num_parts(rows.shape[1]))


def _parts_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty((num_parts(rows.shape[1]), 2, rows.shape[1]), dtype=torch.float32)


def _wide(of_channels: torch.Tensor) -> torch.Tensor:
    return of_channels.view(1, -1, 1, 1)


# --- operators: kernels.py on the GPU, and what they stand for on the CPU ------------------------


@torch.library.custom_op("lockstep::batch_moments", mutates_args=(), device_types="cuda")
def batch_moments(rows: torch.Tensor, chunk: int) -> torch.Tensor:
    """[parts, 2, c] float32: mean, and sum of squared distances from it, of ``chunk`` rows each.

    Args:
        rows: [m, c].
    """
    from lockstep.models.kernels import moments_kernel

    m, c = rows.shape
    out = _parts_of(rows)
    moments_kernel[len(out), -(-c // CHANNELS)](
        rows, out, m, c, chunk, ROWS=ROWS, CHANNELS=CHANNELS, TIMES=TIMES
    )
    return out


@batch_moments.register_fake
def _(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return _parts_of(rows)


@batch_moments.register_kernel("cpu")
def _(rows: torch.Tensor, chunk: int) -> torch.Tensor:
    out = _parts_of(rows).zero_()
    for part, of in zip(out, rows.float().split(chunk), strict=False):
        part[0] = of.mean(0)
        part[1] = (of - part[0]).square().sum(0)
    return out


@torch.library.custom_op("lockstep::gradient_sums", mutates_args=(), device_types="cuda")
def gradient_sums(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    chunk: int,
    relu: bool,
) -> torch.Tensor:
    """[parts, 2, c] float32: sums of gradients, and of gradients times (row - mean), of ``chunk`` rows.

    Args:
        gradient, rows: [m, c]. mean, scale, bias: [c] float32.
        relu: a gradient counts where (row - mean) scale + bias is positive.
    """
    from lockstep.models.kernels import gradient_sums_kernel

    m, c = rows.shape
    out = _parts_of(rows)
    gradient_sums_kernel[len(out), -(-c // CHANNELS)](
        gradient,
        rows,
        mean,
        scale,
        bias,
        out,
        m,
        c,
        chunk,
        RELU=relu,
        ROWS=ROWS,
        CHANNELS=CHANNELS,
        TIMES=TIMES,
    )
    return out


@gradient_sums.register_fake
def _(gradient: torch.Tensor, rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return _parts_of(rows)


@gradient_sums.register_kernel("cpu")
def _(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    chunk: int,
    relu: bool,
) -> torch.Tensor:
    out = _parts_of(rows).zero_()
    centred, flow = rows.float() - mean, gradient.float()
    if relu:
        flow = torch.where(centred * scale + bias > 0, flow, 0.0)
    for part, some, of in zip(out, flow.split(chunk), centred.split(chunk), strict=False):
        part[0] = some.sum(0)
        part[1] = (some * of).sum(0)
    return out


@torch.library.custom_op("lockstep::max_pool", mutates_args=(), device_types="cuda")
def max_pool(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest of the 3 x 3 pixels around every second one, and which it is, counted by rows: int8.

    Args:
        x: [n, h, w, c].

    Returns:
        [n, (h + 1) / 2, (w + 1) / 2, c] each.
    """
    from lockstep.models.kernels import max_pool_kernel

    n, h, w, c = x.shape
    out, places = _pooled(x)
    high, across = out.shape[1], out.shape[2] * c
    max_pool_kernel[n * high, -(-across // _POOL_BLOCK)](
        x, out, places, h, w, c, high, across, BLOCK=_POOL_BLOCK
    )
    return out, places


@max_pool.register_fake
def _pooled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, h, w, c = x.shape
    out = x.new_empty((n, (h + 1) // 2, (w + 1) // 2, c))
    return out, torch.empty_like(out, dtype=torch.int8)


@max_pool.register_kernel("cpu")
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    w = x.shape[2]
    planes = x.permute(0, 3, 1, 2)
    out, at = F.max_pool2d(planes, 3, 2, 1, return_indices=True)
    i = torch.arange(out.shape[2])[:, None]
    j = torch.arange(out.shape[3])[None, :]
    places = (at // w - 2 * i + 1) * 3 + at % w - 2 * j + 1
    return (
        out.permute(0, 2, 3, 1).contiguous(),
        places.to(torch.int8).permute(0, 2, 3, 1).contiguous(),
    )


@torch.library.custom_op("lockstep::max_pool_backward", mutates_args=(), device_types="cuda")
def max_pool_backward(gradient: torch.Tensor, places: torch.Tensor, h: int, w: int) -> torch.Tensor:
    """The gradient [n, h, w, c] of what :func:`max_pool` was given.

    Args:
        gradient, places: [n, (h + 1) / 2, (w + 1) / 2, c].
    """
    from lockstep.models.kernels import max_pool_backward_kernel

    n, high, wide, c = gradient.shape
    out = gradient.new_empty((n, h, w, c))
    max_pool_backward_kernel[n * high, -(-wide * c // _POOL_BLOCK)](
        gradient, places, out, h, w, c, high, wide * c, BLOCK=_POOL_BLOCK
    )
    return out


@max_pool_backward.register_fake
def _(gradient: torch.Tensor, places: torch.Tensor, h: int, w: int) -> torch.Tensor:
    return gradient.new_empty((gradient.shape[0], h, w, gradient.shape[3]))


@max_pool_backward.register_kernel("cpu")
def _(gradient: torch.Tensor, places: torch.Tensor, h: int, w: int) -> torch.Tensor:
    n, high, wide, c = gradient.shape
    out = gradient.new_zeros((n, 2 * high + 2, 2 * wide + 2, c))
    for place in range(9):
        i, j = place // 3, place % 3
        flow = torch.where(places == place, gradient, 0.0)
        out[:, i : i + 2 * high : 2, j : j + 2 * wide : 2] += flow
    return out[:, 1 : h + 1, 1 : w + 1].contiguous()
