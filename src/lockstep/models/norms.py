"""BatchNorm, ReLU and max-pooling of training, in fewer bytes than the compiler finds. Level 2.

Convolutional networks spend most of a step on reading and writing activations for BatchNorm. Here
its sums over a batch are kernels that read what they need once, and ReLU's mask is computed from
BatchNorm's input, which has to be read anyway, instead of being kept. Max-pooling after both is part
of them: what it leaves out is neither written nor read. What works value by value is left to the
compiler, which fuses it with its neighbours. Layers keep their parameters and names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import nn

from lockstep.models.pooling import norm_max_pool, norm_max_pool_backward
from lockstep.models.tile import ALIGNED_CHANNELS, Tile, as_type, has_hooks, rows_of, wide

_MOMENTS = Tile(rows=32, channels=64, times=4, programs=1056)
_SUMS = Tile(rows=16, channels=64, times=4, programs=1056)
_SUMS_WITH_RELU = Tile(rows=32, channels=64, times=2, programs=528)


class FastBatchNorm(nn.BatchNorm2d):
    """``nn.BatchNorm2d``, and what comes after it where asked for: ReLU, and max-pooling of that."""

    relu = False
    pool = False
    """Of 3 x 3 pixels around every second one."""

    def extra_repr(self) -> str:
        """As torch's, and what else is here."""
        ours = f"relu={self.relu}, pool={self.pool}"
        return f"{super().extra_repr()}, {ours}"  # type: ignore[no-untyped-call]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [n, c, h, w]."""
        # One value of a channel has no variance: torch says so.
        usual = input.dim() == 4 and input.numel() > self.num_features
        if not usual or not _trains_on_gpu(self, input):
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
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
            deviation = (variance + self.eps).rsqrt()
        if self.pool:
            input = input.contiguous(memory_format=torch.channels_last)
            pooled: torch.Tensor
            pooled = _NormAndPool.apply(input, self.weight, self.bias, mean, deviation)
            return pooled
        normed: torch.Tensor
        normed = _Norm.apply(input, self.weight, self.bias, mean, deviation, self.relu)
        return normed


def _trains_on_gpu(layer: nn.Module, input: torch.Tensor) -> bool:
    return layer.training and input.is_cuda


def speed_up_norms(model: nn.Module) -> None:
    """Replace the layers of this file in a module that will be compiled, in place."""
    for layer in model.modules():
        if type(layer) is nn.BatchNorm2d and _has_everything(layer):
            _replace(layer, relu=False)
        elif type(layer) is BatchNormAct2d and _adds_at_most_relu(layer):
            _replace(layer, relu=isinstance(layer.act, nn.ReLU))
    for owner, names in _one_after_the_other(model):
        for name, following in pairwise(names):
            norm, act = getattr(owner, name), getattr(owner, following)
            alone = type(norm) is FastBatchNorm and not norm.relu
            if alone and type(act) is nn.ReLU and not has_hooks(act):
                norm.relu = True
                setattr(owner, following, nn.Identity())
        layers = [name for name in names if type(getattr(owner, name)) is not nn.Identity]
        for name, following in pairwise(layers):
            norm, pool = getattr(owner, name), getattr(owner, following)
            if type(norm) is FastBatchNorm and norm.relu and _is_usual_pool(pool):
                norm.pool = True
                setattr(owner, following, nn.Identity())


def _replace(norm: nn.Module, *, relu: bool) -> None:
    norm.__class__ = FastBatchNorm
    assert isinstance(norm, FastBatchNorm)
    norm.relu = relu


def _has_everything(layer: nn.BatchNorm2d) -> bool:
    usual = layer.affine and layer.track_running_stats and layer.momentum is not None
    return usual and layer.num_features % ALIGNED_CHANNELS == 0


def _adds_at_most_relu(layer: BatchNormAct2d) -> bool:
    usual = type(layer.act) in (nn.ReLU, nn.Identity) and type(layer.drop) is nn.Identity
    return usual and not has_hooks(layer.act) and _has_everything(layer)


def _is_usual_pool(layer: nn.Module) -> bool:
    if type(layer) is not nn.MaxPool2d or layer.ceil_mode or layer.return_indices:
        return False
    if has_hooks(layer):
        return False
    return (layer.kernel_size, layer.stride, layer.padding, layer.dilation) == (3, 2, 1, 1)


def _one_after_the_other(model: nn.Module) -> Iterator[tuple[nn.Module, list[str]]]:
    """Modules, and the names in them of layers of which each has the output of the one before."""
    places = Counter(id(m) for owner in model.modules() for m in owner._modules.values())
    for module in model.modules():
        if type(getattr(module, "drop_block", None)) not in (type(None), nn.Identity):
            continue  # lies between two of them
        if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
            # Layers that are elsewhere, too, may have their output used there.
            if all(places[id(layer)] == 1 for layer in module if type(layer) is FastBatchNorm):
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
    rows = rows_of(x)
    near, parts = batch_moments(rows)
    apart, square = parts.sum(0) / len(rows)
    return near + apart, (square - apart.square()).clamp(min=0)


class _Norm(torch.autograd.Function):
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
        output = (as_type(x, torch.float32) - wide(mean)) * wide(weight * deviation)
        output = output + wide(bias)
        return as_type(output.relu() if relu else output, x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, deviation = ctx.saved_tensors
        rows, scale = rows_of(x), weight * deviation
        total, product = sums_of_gradient(rows_of(gradient), rows, mean, scale, bias, relu=ctx.relu)
        flow, centred = gradient.float(), x.float() - wide(mean)
        if ctx.relu:
            flow = torch.where(centred * wide(scale) + wide(bias) > 0, flow, 0.0)
        slope = deviation.square() * product / len(rows)
        flow = (flow - wide(total / len(rows)) - centred * wide(slope)) * wide(scale)
        return flow.to(x.dtype), product * deviation, total, None, None, None


class _NormAndPool(torch.autograd.Function):
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
        result: torch.Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, places, chosen, weight, bias, mean, deviation = ctx.saved_tensors
        scale, count = weight * deviation, x.numel() // len(weight)
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        total, product = sums_of_gradient(
            rows_of(gradient), rows_of(chosen), mean, scale, bias, relu=True
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
        return flow, product * deviation, total, None, None


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
    parts: torch.Tensor = gradient_sums(gradient, rows, mean, scale, bias, relu)
    return parts.sum(0)


def _tile_of_sums(relu: bool) -> Tile:
    return _SUMS_WITH_RELU if relu else _SUMS


# --- operators: kernels.py on the GPU, and what they stand for on the CPU ------------------------


@torch.library.custom_op("lockstep::batch_moments", mutates_args=(), device_types="cuda")
def batch_moments(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of a few rows, and sums of what all are apart from it, and of the square of that.

    Sums of squares of the values themselves would lose the variance of a channel of large mean.

    Args:
        rows: [m, c].

    Returns:
        [c], and of parts of the rows [parts, 2, c]; float32.
    """
    from lockstep.models.kernels import moments_kernel

    near, sums = _moments_like(rows)
    _MOMENTS.launch(moments_kernel, rows, near, sums, rows=rows)
    return near, sums


@batch_moments.register_fake
def _moments_like(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    near = rows.new_empty(rows.shape[1], dtype=torch.float32)
    return near, _MOMENTS.sums_like(rows, 2)


@batch_moments.register_kernel("cpu")
def _(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    near = rows[: _MOMENTS.rows].float().mean(0)
    apart = rows.float() - near
    return near, _MOMENTS.sum_parts(torch.stack([apart, apart.square()], 1))


@torch.library.custom_op("lockstep::gradient_sums", mutates_args=(), device_types="cuda")
def gradient_sums(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    relu: bool,
) -> torch.Tensor:
    """[parts, 2, c] float32: sums of gradients, and of gradients times (row - mean).

    Args:
        gradient, rows: [m, c]. mean, scale, bias: [c] float32.
        relu: a gradient counts where (row - mean) scale + bias is positive.
    """
    from lockstep.models.kernels import gradient_sums_kernel

    tile = _tile_of_sums(relu)
    sums = tile.sums_like(rows, 2)
    tile.launch(gradient_sums_kernel, gradient, rows, mean, scale, bias, sums, rows=rows, RELU=relu)
    return sums


@gradient_sums.register_fake
def _(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    relu: bool,
) -> torch.Tensor:
    return _tile_of_sums(relu).sums_like(rows, 2)


@gradient_sums.register_kernel("cpu")
def _(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    relu: bool,
) -> torch.Tensor:
    centred, flow = rows.float() - mean, gradient.float()
    if relu:
        flow = torch.where(centred * scale + bias > 0, flow, 0.0)
    return _tile_of_sums(relu).sum_parts(torch.stack([flow, flow * centred], 1))
