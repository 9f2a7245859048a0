"""Kernels for GPUs of a Vision Transformer's block, in Triton; as ``kernels.py``. Level 2.

Rows are tokens: [rows, channels].
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.models.kernels import block_of, rows_of_program


@triton.jit
def _normal_below(value, LIMIT: tl.constexpr, SERIES: tl.constexpr):
    near = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
    square = near * near
    series = square * 0 + SERIES[0]
    for k in tl.static_range(1, len(SERIES)):
        series = series * square + SERIES[k]
    return tl.where(value > -LIMIT, tl.where(value < LIMIT, 0.5 + near * series, 1.0), 0.0)


@triton.jit(do_not_specialize=["rows"])
def gelu_kernel(
    x,
    bias,
    out,
    rows,
    channels,
    LIMIT: tl.constexpr,
    SERIES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """GELU(x + bias); see the kernel below."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * TIMES)
    x += first * channels
    out += first * channels
    count = (rows - first).to(tl.int32)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    offset = tl.load(bias + channel, mask=channel < channels, other=0)
    for i in tl.static_range(TIMES):
        at, inside = block_of(i * ROWS, count, channel, channels, ROWS)
        value = tl.load(x + at, mask=inside, other=0).to(tl.float32) + offset[None, :]
        tl.store(out + at, value * _normal_below(value, LIMIT, SERIES), mask=inside)


@triton.jit(do_not_specialize=["rows", "chunk"])
def gelu_backward_kernel(
    gradient,
    x,
    bias,
    out,
    sums,
    rows,
    channels,
    chunk,
    LIMIT: tl.constexpr,
    SERIES: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """Gradients of GELU(x + bias) with respect to x, and their sums over a part of the rows.

    Args:
        gradient, x, out: [rows, channels].
        bias: [channels] float32.
        sums: [parts, channels] float32.
        chunk: rows of a part.
        SERIES: coefficients of (normal distribution - 1/2) / x in x^2, the last first.
    """
    part, channel, is_channel, count = rows_of_program(rows, channels, chunk, CHANNELS)
    x += part * chunk * channels
    gradient += part * chunk * channels
    out += part * chunk * channels
    offset = tl.load(bias + channel, mask=is_channel, other=0)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            at, inside = block_of(start + i * ROWS, count, channel, channels, ROWS)
            flow = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
            value = tl.load(x + at, mask=inside, other=0).to(tl.float32) + offset[None, :]
            below = _normal_below(value, LIMIT, SERIES)
            # exp2, which the GPU has as one instruction.
            density = 0.3989422804014327 * tl.exp2(value * value * -0.7213475204444817)
            flow *= below + value * density
            flow = tl.where(inside, flow, 0)
            total += flow
            tl.store(out + at, flow, mask=inside)
    tl.store(sums + part * channels + channel, tl.sum(total, 0), mask=is_channel)


@triton.jit(do_not_specialize=["rows", "chunk", "tokens"])
def norm_backward_kernel(
    residual,
    gradient,
    x,
    mean,
    deviation,
    weight,
    kept,
    tokens,
    out,
    branch,
    sums,
    rows,
    channels,
    chunk,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """LayerNorm's gradients added to others of its input, and sums over a part of the rows.

    Args:
        residual, gradient, x, out: [rows, channels], at most ``CHANNELS``.
        mean, deviation: [rows] float32, the latter's inverse.
        weight: [channels] float32.
        kept: None, or [rows / tokens]: what to multiply rows by for ``branch``, like out.
        sums: [parts, 3, channels] float32: of gradients times normed values, of gradients, and of
            ``branch`` (or out).
    """
    part, channel, is_channel, count = rows_of_program(rows, channels, chunk, CHANNELS)
    residual += part * chunk * channels
    gradient += part * chunk * channels
    x += part * chunk * channels
    out += part * chunk * channels
    branch += part * chunk * channels
    mean += part * chunk
    deviation += part * chunk
    factor = tl.load(weight + channel, mask=is_channel, other=0)
    of_weight = tl.zeros([CHANNELS], tl.float32)
    of_bias = tl.zeros([CHANNELS], tl.float32)
    of_branch = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            row = start + i * ROWS + tl.arange(0, ROWS)
            at, inside = block_of(start + i * ROWS, count, channel, channels, ROWS)
            flow = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
            value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
            passed = tl.load(residual + at, mask=inside, other=0).to(tl.float32)
            centre = tl.load(mean + row, mask=row < count, other=0)[:, None]
            scale = tl.load(deviation + row, mask=row < count, other=0)[:, None]
            value = (value - centre) * scale
            of_weight += tl.sum(flow * value, 0)
            of_bias += tl.sum(flow, 0)
            flow *= factor[None, :]
            shift = tl.sum(flow, 1)[:, None] / channels
            slope = tl.sum(flow * value, 1)[:, None] / channels
            flow = passed + (flow - shift - value * slope) * scale
            tl.store(out + at, flow, mask=inside)
            if kept is not None:
                image = ((part * chunk).to(tl.int32) + row) // tokens
                flow *= tl.load(kept + image, mask=row < count, other=0).to(tl.float32)[:, None]
                tl.store(branch + at, flow, mask=inside)
            of_branch += tl.sum(flow, 0)
    sums += part * 3 * channels + channel
    tl.store(sums, of_weight, mask=is_channel)
    tl.store(sums + channels, of_bias, mask=is_channel)
    tl.store(sums + 2 * channels, of_branch, mask=is_channel)


@triton.jit
def _of_three(which, first, second, third):
    return tl.where(which == 0, first, tl.where(which == 1, second, third))


@triton.jit(do_not_specialize=["rows", "chunk"])
def join_heads_kernel(
    q,
    k,
    v,
    q_image,
    q_head,
    q_token,
    k_image,
    k_head,
    k_token,
    v_image,
    v_head,
    v_token,
    out,
    sums,
    tokens,
    rows,
    channels,
    chunk,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """Lay three tensors side by side in rows of tokens, and sum a part of the rows.

    Args:
        q, k, v: [n, heads, tokens, WIDTH], whose last values lie together.
        q_image, q_head, q_token, ...: strides.
        out: [rows, channels]: a third of the channels is a multiple of ``CHANNELS``.
        sums: [parts, channels] float32.
        chunk: rows of a part.
    """
    part, channel, _, count = rows_of_program(rows, channels, chunk, CHANNELS)
    third, begin = channels // 3, tl.program_id(1) * CHANNELS
    which = begin // third
    x = _of_three(which, q, k, v)
    of_image = _of_three(which, q_image, k_image, v_image)
    of_head = _of_three(which, q_head, k_head, v_head)
    of_token = _of_three(which, q_token, k_token, v_token)
    inner = tl.multiple_of(begin % third, CHANNELS) + tl.arange(0, CHANNELS)
    across = inner // WIDTH * of_head + inner % WIDTH
    out += part * chunk * channels
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            at, inside = block_of(start + i * ROWS, count, channel, channels, ROWS)
            row = (part * chunk).to(tl.int32) + start + i * ROWS + tl.arange(0, ROWS)
            to_row = (row // tokens).to(tl.int64) * of_image + row % tokens * of_token
            value = tl.load(x + to_row[:, None] + across[None, :], mask=inside, other=0)
            total += value.to(tl.float32)
            tl.store(out + at, value, mask=inside)
    tl.store(sums + part * channels + channel, tl.sum(total, 0))
