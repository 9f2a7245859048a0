"""BatchNorm, ReLU and max-pooling of training, in fewer bytes than the compiler finds. Level 2.

Convolutional networks spend most of a step on reading and writing activations for BatchNorm. Here
its sums over a batch are kernels that read what they need once, and ReLU's mask is computed from
BatchNorm's input, which has to be read anyway, instead of being kept. Max-pooling after both is part
of them: what it leaves out is neither written nor read. What works value by value is left to the
compiler, which fuses it with its neighbours. Layers keep their parameters and names.
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

from lockstep.models.tile import ALIGNED_CHANNELS, Tile

_POOL_BLOCK = 512
_MOMENTS = Tile(rows=32, channels=64, times=4, programs=1056)
_SUMS = Tile(rows=16, channels=64, times=4, programs=1056)
_SUMS_WITH_RELU = Tile(rows=32, channels=64, times=2, programs=528)


class FastBatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d``, and what comes after it where asked for: ReLU, and max-pooling of that."""

    relu = False
    pool = False
    """Of 3 x 3 pixels around every second one."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [n, c, h, w]."""
        if not _is_for_us(self, input):
            output = super().forward(input)
            output = F.relu(output) if self.relu else output
            return F.max_pool2d(output, 3, 2, 1) if self.pool else output
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None and self.momentum is not None
        with torch.no_grad():
            count = input.numel() // self.num_features
            mean, variance = moments(input)
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
            deviation = (variance + self.eps).rsqrt()
        if self.pool:
            input = input.contiguous(memory_format=torch.channels_last)
            return _result(_BatchNormPool.apply(input, self.weight, self.bias, mean, deviation))
        return _result(_BatchNorm.apply(input, self.weight, self.bias, mean, deviation, self.relu))


def _is_for_us(layer: nn.Module, input: torch.Tensor) -> bool:
    return layer.training and input.is_cuda


def speed_up_norms(model: nn.Module) -> None:
    """Replace the layers of this file in a module that will be compiled, in place."""
    for owner, names in _one_after_the_other(model):
        for name, following in pairwise(names):
            norm, act = getattr(owner, name), getattr(owner, following)
            if _is_plain(norm) and type(act) is nn.ReLU:
                _replace(norm, relu=True)
                setattr(owner, following, nn.Identity())
    for layer in model.modules():
        if _is_plain(layer):
            _replace(layer, relu=False)
        elif type(layer) is BatchNormAct2d and _adds_at_most_relu(layer):
            _replace(layer, relu=isinstance(layer.act, nn.ReLU))
    for owner, names in _one_after_the_other(model):
        layers = [name for name in names if type(getattr(owner, name)) is not nn.Identity]
        for name, following in pairwise(layers):
            norm, pool = getattr(owner, name), getattr(owner, following)
            if type(norm) is FastBatchNorm and norm.relu and _is_usual(pool):
                norm.pool = True
                setattr(owner, following, nn.Identity())


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


def _is_usual(layer: nn.Module) -> bool:
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    return (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == (3, 2, 1, 1)


def _one_after_the_other(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules, and the names in them of layers of which each has the output of the one before."""
    for module in model.modules():
        if type(getattr(module, "drop_block", None)) not in (type(None), nn.Identity):
            continue  # lies between them
        if isinstance(module, nn.Sequential):
            yield module, list(module._modules)
        elif type(module) is ResNet:
            yield module, ["bn1", "act1", "maxpool"]
        elif type(module) in (BasicBlock, Bottleneck):
            yield module, ["bn1", "act1"]
            if type(module) is Bottleneck:
                yield module, ["bn2", "act2"]


# --- functions ------------------------------------------------------------------------------------


def moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel.

    Args:
        x: [n, c, h, w].

    Returns:
        [c] float32 each.
    """
    rows = _rows(x)
    apart, square = batch_moments(rows, _MOMENTS.chunk(rows)).sum(0) / len(rows)
    return rows[0].float() + apart, (square - apart.square()).clamp(min=0)


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
        output = (as_type(x, torch.float32) - _wide(mean)) * _wide(weight * deviation)
        output = output + _wide(bias)
        return as_type(output.relu() if relu else output, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, deviation = ctx.saved_tensors
        rows, scale = _rows(x), weight * deviation
        total, product = sums_of_gradient(_rows(gradient), rows, mean, scale, bias, relu=ctx.relu)
        flow, centred = gradient.float(), x.float() - _wide(mean)
        if ctx.relu:
            flow = torch.where(centred * _wide(scale) + _wide(bias) > 0, flow, 0.0)
        slope = deviation.square() * product / len(rows)
        flow = (flow - _wide(total / len(rows)) - centred * _wide(slope)) * _wide(scale)
        return flow.to(x.dtype), product * deviation, total, None, None, None


class _BatchNormPool(torch.autograd.Function):
    """BatchNorm, ReLU, and max-pooling."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        deviation: torch.Tensor,
    ) -> torch.Tensor:
        output, places, chosen = norm_max_pool(x, mean, weight * deviation, bias)
        ctx.save_for_backward(x, places, chosen, weight, bias, mean, deviation)
        return _result(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, places, chosen, weight, bias, mean, deviation = ctx.saved_tensors
        scale, count = weight * deviation, x.numel() // len(weight)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        total, product = sums_of_gradient(
            _rows(gradient), _rows(chosen), mean, scale, bias, relu=True
        )
        flow = norm_max_pool_backward(
            gradient,
            places,
            x,
            mean,
            scale,
            total / count,
            deviation.square() * product / count,
        )
        return _result(flow), product * deviation, total, None, None


def sums_of_gradient(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    *,
    relu: bool,
) -> torch.Tensor:
    """[2, c] float32: of all parts of :func:`gradient_sums`."""
    chunk = _tile_of_sums(relu).chunk(rows)
    return _result(gradient_sums(gradient, rows, mean, scale, bias, chunk, relu)).sum(0)


def _tile_of_sums(relu: bool) -> Tile:
    return _SUMS_WITH_RELU if relu else _SUMS


def _result(of_function: Any) -> torch.Tensor:
    output: torch.Tensor = of_function
    return output


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[n, c, h, w] as contiguous [n h w, c]; no copy where channels lie last."""
    return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).contiguous()


def as_type(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x itself where it has the type: torch 2.11's compiler takes a function's result that is another
    of its values for two, and loses the gradient of one."""
    return x if x.dtype == dtype else x.to(dtype)


def _wide(of_channels: torch.Tensor) -> torch.Tensor:
    return of_channels.view(1, -1, 1, 1)


# --- operators: kernels.py on the GPU, and what they stand for on the CPU ------------------------


@torch.library.custom_op("lockstep::batch_moments", mutates_args=(), device_types="cuda")
def batch_moments(rows: torch.Tensor, chunk: int) -> torch.Tensor:
    """[parts, 2, c] float32: sums of a row less the first, and of its square, of ``chunk`` rows each.

    Sums of squares of the values themselves would lose the variance of a channel of large mean.

    Args:
        rows: [m, c].
    """
    from lockstep.models.kernels import moments_kernel

    out = _parts_like(rows, _MOMENTS)
    _MOMENTS.launch(moments_kernel, rows, out, rows=rows, chunk=chunk)
    return out


@batch_moments.register_fake
def _(rows: torch.Tensor, *_: Any) -> torch.Tensor:
    return _parts_like(rows, _MOMENTS)


@batch_moments.register_kernel("cpu")
def _(rows: torch.Tensor, chunk: int) -> torch.Tensor:
    out = _parts_like(rows, _MOMENTS).zero_()
    for part, of in zip(out, (rows.float() - rows[0].float()).split(chunk), strict=False):
        part[0] = of.sum(0)
        part[1] = of.square().sum(0)
    return out


def _parts_like(rows: torch.Tensor, tile: Tile) -> torch.Tensor:
    c = rows.shape[1]
    return rows.new_empty((tile.parts(c), 2, c), dtype=torch.float32)


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

    tile = _tile_of_sums(relu)
    out = _parts_like(rows, tile)
    tile.launch(
        gradient_sums_kernel, gradient, rows, mean, scale, bias, out,
        rows=rows, chunk=chunk, RELU=relu,
    )  # fmt: skip
    return out


@gradient_sums.register_fake
def _(_: torch.Tensor, rows: torch.Tensor, *others: Any) -> torch.Tensor:
    return _parts_like(rows, _tile_of_sums(others[-1]))


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
    out = _parts_like(rows, _tile_of_sums(relu)).zero_()
    centred, flow = rows.float() - mean, gradient.float()
    if relu:
        flow = torch.where(centred * scale + bias > 0, flow, 0.0)
    for part, some, of in zip(out, flow.split(chunk), centred.split(chunk), strict=False):
        part[0] = some.sum(0)
        part[1] = (some * of).sum(0)
    return out


@torch.library.custom_op("lockstep::norm_max_pool", mutates_args=(), device_types="cuda")
def norm_max_pool(
    x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Largest ReLU((x - mean) scale + bias) of the 3 x 3 pixels around every second one.

    Args:
        x: [n, c, h, w], channels last. mean, scale, bias: [c] float32.

    Returns:
        [n, c, (h + 1) / 2, (w + 1) / 2] each, channels last: that; which of the pixels it is, counted by rows, int8,
        9 where none is positive; its x.
    """
    from lockstep.models.kernels import norm_max_pool_kernel

    n, c, h, w = x.shape
    out, places, chosen = _pooled(x)
    high, across = out.shape[2], out.shape[3] * c
    norm_max_pool_kernel[n * high, -(-across // _POOL_BLOCK)](
        x, mean, scale, bias, out, places, chosen, h, w, c, high, across, BLOCK=_POOL_BLOCK
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
    planes = (x.float() - _wide(mean)) * _wide(scale) + _wide(bias)
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

    (n, c, h, w), (high, wide) = x.shape, gradient.shape[2:]
    out = torch.empty_like(x, memory_format=torch.channels_last)
    norm_max_pool_backward_kernel[n * high, -(-wide * c // _POOL_BLOCK)](
        gradient, places, x, mean, scale, shift, slope, out, h, w, c, high, wide * c,
        BLOCK=_POOL_BLOCK,
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
    (n, c, h, w), (high, wide) = x.shape, gradient.shape[2:]
    flow = torch.zeros(n, c, 2 * high + 2, 2 * wide + 2)
    for place in range(9):
        i, j = place // 3, place % 3
        of = gradient.where(places == place, 0.0)
        flow[..., i : i + 2 * high : 2, j : j + 2 * wide : 2] += of
    flow = flow[..., 1 : h + 1, 1 : w + 1] - _wide(shift)
    out = torch.empty_like(x, memory_format=torch.channels_last)
    return out.copy_((flow - (x.float() - _wide(mean)) * _wide(slope)) * _wide(scale))
