"""Attention of training in 16 bits over few tokens, as one kernel forward and one backward. Level 2.

torch's kernels are made for long sequences: they add gradients of queries up in 32 bits and convert
them, and those of queries, keys and values are then copied side by side, and summed for the bias.
Over the patches of an image that is as much as attention itself. Here it happens where they are
computed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lockstep.models.vit import FastAttention

_WIDTH = 64
"""Of a head."""
_MOST_TOKENS = 256
_HOPPER = 9
_SCALE = _WIDTH**-0.5
_FACTOR = _SCALE / math.log(2)
"""Of scores to base 2."""
_PIECES = ((64, 0, 0), (128, 0, 0), (128, 64, 0), (128, 64, 16), (128, 64, 32), (128, 128, 0))
"""Of keys, forward, in which few are computed in vain; sizes are powers of two."""
_LAUNCH = {"num_warps": 4, "maxnreg": 168}
"""So many registers of a thread let three programs share a processor. With more than 224 tokens,
shared memory lets two."""


class ShortAttention(FastAttention):
    """The same over few tokens, without what its kernels do for many."""

    def attend(self, joint: torch.Tensor) -> torch.Tensor:
        """[n, tokens, c] of [n, tokens, 3 c]: queries, keys and values, with their bias."""
        if joint.shape[1] > _MOST_TOKENS:
            return super().attend(joint)
        return short_attention(joint, self.qkv.bias, self.num_heads)


def speed_up_attention(model: nn.Module) -> None:
    """Replace layers that ``speed_up_blocks`` has put into a module that will be compiled."""
    if not _is_on_our_gpu():
        return
    for layer in model.modules():
        if type(layer) is FastAttention and _is_usual(layer):
            layer.__class__ = ShortAttention


def _is_on_our_gpu() -> bool:
    """The kernels are made for one family's tensor cores and memory."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None  # AMD counts to 9, too
    return is_nvidia and torch.cuda.get_device_capability()[0] == _HOPPER


def _is_usual(layer: FastAttention) -> bool:
    narrow = layer.qkv.out_features == 3 * layer.num_heads * _WIDTH
    return narrow and layer.attn_drop.p == 0


def short_attention(x: torch.Tensor, bias: torch.Tensor, heads: int) -> torch.Tensor:
    """softmax(q k^T / 8) v of each head.

    Args:
        x: [n, tokens, 3 heads 64], 16 bits: queries, keys and values, ``bias`` added.
        bias: given for its gradient.

    Returns:
        [n, tokens, heads 64].
    """
    output: torch.Tensor = _Attend.apply(x, bias, heads)
    return output.flatten(2)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, heads: int) -> torch.Tensor:
        qkv = x.contiguous().view(*x.shape[:2], 3, heads, _WIDTH)
        output: torch.Tensor
        output, lse = attention(qkv)
        ctx.save_for_backward(qkv, output, lse)
        ctx.dtype = bias.dtype
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        qkv, output, lse = ctx.saved_tensors
        flow, sums = attention_backward(gradient.contiguous(), qkv, output, lse)
        of_queries, of_values = sums.sum(0).flatten(1)
        of_keys = torch.zeros_like(of_queries)  # the same for every key changes no weight
        of_bias = torch.cat([of_queries, of_keys, of_values]).to(ctx.dtype)
        return flow.flatten(2), of_bias, None


@torch.library.custom_op("lockstep::attention", mutates_args=(), device_types="cuda")
def attention(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T / 8) v of each head.

    Args:
        qkv: [n, tokens, 3, heads, 64], contiguous, 16 bits.

    Returns:
        [n, tokens, heads, 64], and for :func:`attention_backward` [n, heads, _MOST_TOKENS] float32:
        log2 of the sum of a query's exp(q k^T / 8).
    """
    from lockstep.models.attention_kernels import FORWARD_ROWS, attention_kernel, descriptor

    out, lse = _outputs_like(qkv)
    n, tokens, _, heads, _ = qkv.shape
    queries = FORWARD_ROWS.value
    first, second, third = pieces = _pieces(tokens)
    keys = [descriptor(qkv, piece or first) for piece in pieces]  # not read where there is no piece
    attention_kernel[n * heads,](
        descriptor(qkv, queries), *keys, descriptor(out, queries), lse, _FACTOR, tokens, heads,
        MOST=_MOST_TOKENS, KEYS_1=first, KEYS_2=second, KEYS_3=third, **_LAUNCH,
    )  # fmt: skip
    return out, lse


@attention.register_fake
def _outputs_like(qkv: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    n, tokens, _three, heads, width = qkv.shape
    return (
        qkv.new_empty((n, tokens, heads, width)),
        qkv.new_empty((n, heads, _MOST_TOKENS), dtype=torch.float32),
    )


@attention.register_kernel("cpu")
def _(qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _outputs_like(qkv)
    q, k, v = _by_head(qkv)
    with torch.autocast("cpu", enabled=False):
        score = q @ k.mT * _SCALE
        lse.zero_()[:, :, : qkv.shape[1]] = score.logsumexp(-1) / math.log(2)
        return out.copy_((score.softmax(-1) @ v).transpose(1, 2)), lse


@torch.library.custom_op("lockstep::attention_backward", mutates_args=(), device_types="cuda")
def attention_backward(
    gradient: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of qkv, and sums over the tokens of that of queries and of values.

    Args:
        gradient: of ``out``, contiguous.
        qkv, out, lse: arguments and results of :func:`attention`.

    Returns:
        Like qkv, and [n, 2, heads, 64] float32.
    """
    from lockstep.models.attention_kernels import (
        BACKWARD_KEYS,
        BACKWARD_ROWS,
        attention_backward_kernel,
        descriptor,
    )

    flow, sums = _gradients_like(gradient, qkv)
    n, tokens, _, heads, _ = qkv.shape
    keys, rows = BACKWARD_KEYS.value, BACKWARD_ROWS.value
    most = _MOST_TOKENS // rows
    attention_backward_kernel[n * heads,](
        descriptor(gradient, rows), descriptor(qkv, rows), descriptor(qkv, keys),
        descriptor(out, rows), lse, descriptor(flow, rows), descriptor(flow, keys), sums,
        _FACTOR, _SCALE, tokens, heads, MOST=_MOST_TOKENS,
        BLOCKS=most if tokens > (most - 1) * rows else most - 1, **_LAUNCH,
    )  # fmt: skip
    return flow, sums


@attention_backward.register_fake
def _gradients_like(
    _: torch.Tensor, qkv: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    n, _tokens, _three, heads, width = qkv.shape
    return torch.empty_like(qkv), qkv.new_empty((n, 2, heads, width), dtype=torch.float32)


@attention_backward.register_kernel("cpu")
def _(
    gradient: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    flow, sums = _gradients_like(gradient, qkv)
    q, k, v = _by_head(qkv)
    do, o = (t.float().transpose(1, 2) for t in (gradient, out))
    with torch.autocast("cpu", enabled=False):
        weight = torch.exp2(q @ k.mT * _FACTOR - lse[:, :, : qkv.shape[1], None])
        ds = weight * (do @ v.mT - (do * o).sum(-1, keepdim=True)) * _SCALE
        flows = torch.stack([ds @ k, ds.mT @ q, weight.mT @ do]).permute(1, 3, 0, 2, 4)
    return flow.copy_(flows), sums.copy_(flows.sum(1)[:, ::2])


def _by_head(qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """[n, heads, tokens, 64] float32 each."""
    return qkv.float().permute(2, 0, 3, 1, 4).unbind(0)


def _pieces(tokens: int) -> tuple[int, int, int]:
    """Of keys, which hold all; only the last is not full."""
    return next(pieces for pieces in _PIECES if tokens <= sum(pieces))
