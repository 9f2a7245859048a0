"""A Vision Transformer's block in 16 bits: what its gradients need, read once. Level 2.

LayerNorm's backward pass ends where the gradient of the residual is added, and begins with what the
gradients of its weight and bias are sums of: one kernel here. Another lays the gradients of queries,
keys and values side by side, as the matrix products before them want it, and sums them for the bias
meanwhile. Forward passes but attention's and GELU's stay torch's operations, for the compiler to fuse
with what lies around them. Layers keep their parameters and names.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, GluMlp, LayerNorm, Mlp, SwiGLU
from timm.models.vision_transformer import Block
from torch import nn

from lockstep.models.mlp import FastMlp
from lockstep.models.tile import (
    ALIGNED_CHANNELS,
    Tile,
    as_type,
    has_hooks,
    trains_in_16_bits,
)

_HEADS = Tile(rows=32, channels=64, times=2, programs=1056)
_WIDEST = 4096
_CHANNELS_OF_WARP = 256
"""Each thread reads 16 bytes of a row, and has the same channels of all rows: sums stay in it."""
_FIRST_IS_LINEAR = (Mlp, FastMlp, GluMlp, SwiGLU)


class FastBlock(Block):
    """timm's; its own way where a GPU trains with autocast to 16 bits."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x: [n, tokens, c]; anything else (a mask) is left to timm."""
        hooked = has_hooks(self.norm1) or has_hooks(self.norm2)
        if hooked or _is_asked_for_more(args, kwargs) or not trains_in_16_bits(self, x):
            output: torch.Tensor = super().forward(x, *args, **kwargs)
            return output
        x, normed = residual_norm(x, self.norm1)
        x = x + self.drop_path1(self.ls1(self.attn(normed)))
        x, normed = residual_norm(x, self.norm2)
        output = x + self.drop_path2(self.ls2(self.mlp(normed)))
        return output


class FastAttention(Attention):
    """timm's; its own way where a GPU trains with autocast to 16 bits."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x: [n, tokens, c]; anything else (a mask) is left to timm."""
        output: torch.Tensor
        hooked = has_hooks(self.qkv)
        if hooked or _is_asked_for_more(args, kwargs) or not trains_in_16_bits(self, x):
            output = super().forward(x, *args, **kwargs)
            return output
        # The product adds the bias, but has no gradient for it.
        joint = F.linear(x, self.qkv.weight, self.qkv.bias.detach())
        output = self.proj_drop(self.proj(self.norm(self.attend(joint))))
        return output

    def attend(self, joint: torch.Tensor) -> torch.Tensor:
        """[n, tokens, c] of [n, tokens, 3 c]: queries, keys and values, with their bias."""
        q, k, v = _Heads.apply(joint, self.qkv.bias, self.num_heads)
        output = F.scaled_dot_product_attention(q, k, v, dropout_p=self.attn_drop.p)
        return output.transpose(1, 2).flatten(2)


def speed_up_blocks(model: nn.Module) -> None:
    """Replace the layers of this file in a module that will be compiled, in place."""
    for layer in model.modules():
        if type(layer) is Attention and _is_usual(layer):
            layer.__class__ = FastAttention
    for layer in model.modules():
        if type(layer) is Block and _is_made_of_known(layer):
            layer.__class__ = FastBlock


def _is_usual(layer: Attention) -> bool:
    normed = type(layer.q_norm) is not nn.Identity or type(layer.k_norm) is not nn.Identity
    if normed or not layer.fused_attn or getattr(layer, "gate", None) is not None:
        return False
    qkv = layer.qkv
    if type(qkv) is not nn.Linear or qkv.bias is None:
        return False
    width = qkv.out_features // 3 // layer.num_heads
    return width % ALIGNED_CHANNELS == 0 and width * layer.num_heads % _HEADS.channels == 0


def _is_made_of_known(block: Block) -> bool:
    """Whether what is normed goes to layers alone that round it to 16 bits at once."""
    norms = _is_plain(block.norm1) and _is_plain(block.norm2)
    attention = type(block.attn) in (Attention, FastAttention)
    return norms and attention and type(block.mlp) in _FIRST_IS_LINEAR


def _is_plain(norm: nn.Module) -> bool:
    if type(norm) not in (nn.LayerNorm, LayerNorm) or getattr(norm, "_fast_norm", False):
        return False
    assert isinstance(norm, nn.LayerNorm)
    if not norm.elementwise_affine or norm.bias is None or len(norm.normalized_shape) != 1:
        return False
    channels = norm.normalized_shape[0]
    return channels % ALIGNED_CHANNELS == 0 and channels <= _WIDEST


def _is_asked_for_more(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(value is not None and value is not False for value in (*args, *kwargs.values()))


# --- functions ------------------------------------------------------------------------------------


def residual_norm(x: torch.Tensor, norm: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """``x``, and its LayerNorm in autocast's dtype. Use both: their gradients are added in one pass.

    Args:
        x: [..., c]. norm: ``nn.LayerNorm`` of c, with weight and bias.
    """
    dtype = torch.get_autocast_dtype(x.device.type)
    same, normed = _ResidualNorm.apply(x, norm.weight, norm.bias, norm.eps, dtype)
    return same, normed


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        eps: float,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, mean, deviation = torch.native_layer_norm(
            as_type(x, torch.float32), weight.shape, weight.float(), bias.float(), eps
        )
        ctx.save_for_backward(x, mean, deviation, weight)
        # Compiled, a copy that is read within the graph is none.
        return x.clone(), as_type(normed, dtype)

    @staticmethod
    def backward(
        ctx: Any, residual: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, mean, deviation, weight = ctx.saved_tensors
        residual, gradient, rows = (
            t.reshape(-1, len(weight)).contiguous() for t in (residual, gradient, x)
        )
        flow, _, parts = norm_backward(
            residual, gradient, rows, mean.flatten(), deviation.flatten(), weight.float(), None
        )
        of_weight, of_bias, _ = parts.sum(0).to(weight.dtype)
        return flow.view_as(x), of_weight, of_bias, None, None


class _Heads(torch.autograd.Function):
    """Of [n, tokens, 3 c]: queries, keys and values, [n, heads, tokens, width] each.

    ``bias`` has been added; it is given for its gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, joint: torch.Tensor, bias: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.dtype = bias.dtype
        q, k, v = joint.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        n, _, tokens, _ = gradients[0].shape
        joint, parts = join_heads(*gradients)
        return joint.view(n, tokens, -1), parts.sum(0).to(ctx.dtype), None


# --- operators: vit_kernels.py on the GPU, and what they stand for on the CPU --------------------


def _norm_tile(channels: int) -> tuple[Tile, int]:
    """Whole rows, and the number of warps."""
    channels = 1 << (channels - 1).bit_length()
    warps = max(1, channels // _CHANNELS_OF_WARP)
    return Tile(rows=2, channels=channels, times=1, programs=132 * (20 // warps)), warps


@torch.library.custom_op("lockstep::norm_backward", mutates_args=(), device_types="cuda")
def norm_backward(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of x, whose LayerNorm has ``gradient`` and which has itself ``residual``.

    Args:
        residual, gradient, x: [m, c]. weight: [c] float32.
        mean, deviation: [m] float32, the latter's inverse.
        kept: [n, 1, ...] or None: what the gradient is multiplied by, image by image, for the branch that
            was added to make x (stochastic depth). The pass of ``models/join.py`` gives it.

    Returns:
        Like x. For the branch: like gradient (empty without ``kept``). And [parts, 3, c] float32,
        whose sums are the gradients of weight and bias, and the sum of the branch's (or x's).
    """
    from lockstep.models.vit_kernels import norm_backward_kernel

    out, branch, sums = _normed_like(gradient, x, kept)
    tile, warps = _norm_tile(x.shape[1])
    tokens = 1 if kept is None else len(x) // len(kept)
    tile.launch(
        norm_backward_kernel, residual, gradient, x, mean, deviation, weight,
        None if kept is None else kept.flatten().contiguous(), tokens, out, branch, sums,
        rows=x, num_warps=warps,
    )  # fmt: skip
    return out, branch, sums


def _normed_like(
    gradient: torch.Tensor, x: torch.Tensor, kept: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    branch = gradient.new_empty(0) if kept is None else torch.empty_like(gradient)
    return torch.empty_like(x), branch, _norm_tile(x.shape[1])[0].sums_like(x, 3)


@norm_backward.register_fake
def _(
    residual: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _normed_like(gradient, x, others[-1])


@norm_backward.register_kernel("cpu")
def _(
    residual: torch.Tensor,
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
    weight: torch.Tensor,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    value = (x.float() - mean[:, None]) * deviation[:, None]
    flow = gradient.float() * weight
    shift, slope = flow.mean(1, keepdim=True), (flow * value).mean(1, keepdim=True)
    out = residual + (flow - shift - value * slope) * deviation[:, None]
    _, branch, _ = _normed_like(gradient, x, kept)
    of_branch = out.float()
    if kept is not None:
        of_branch = (of_branch.unflatten(0, (len(kept), -1)) * kept.view(-1, 1, 1)).flatten(0, 1)
        branch.copy_(of_branch)
    sums = torch.stack([gradient * value, gradient.float(), of_branch], 1)
    return out.to(x.dtype), branch, _norm_tile(x.shape[1])[0].sum_parts(sums)


@torch.library.custom_op("lockstep::join_heads", mutates_args=(), device_types="cuda")
def join_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of tokens, in which lie q, k and v, each head by head; and sums of parts of the rows.

    Args:
        q, k, v: [n, heads, tokens, width].

    Returns:
        [n tokens, 3 heads width], and [parts, 3 heads width] float32.
    """
    from lockstep.models.vit_kernels import join_heads_kernel

    out, sums = _joined_like(q)
    q, k, v = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k, v))
    _HEADS.launch(
        join_heads_kernel, q, k, v, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], out, sums,
        q.shape[2], rows=out, WIDTH=q.shape[3],
    )  # fmt: skip
    return out, sums


@join_heads.register_fake
def _joined_like(q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    n, heads, tokens, width = q.shape
    out = q.new_empty((n * tokens, 3 * heads * width))
    return out, _HEADS.sums_like(out)


@join_heads.register_kernel("cpu")
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n, _, tokens, _ = q.shape
    out = torch.stack([q, k, v]).permute(1, 3, 0, 2, 4).reshape(n * tokens, -1)
    return out, _HEADS.sum_parts(out)
