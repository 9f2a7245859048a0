"""Kernels for GPUs, in Triton: import this file only where there is one. Level 2.

Activations lie channels last: [rows, channels], where a row is a pixel of an image. Sums over rows
are taken in parts, each by one program, which reads its rows from first to last.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "chunk"])
def moments_kernel(
    x, out, rows, channels, chunk, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TIMES: tl.constexpr
):
    """Mean and sum of squared distances from it, of a part of the rows.

    Args:
        x: [rows, channels].
        out: [parts, 2, channels] float32.
        chunk: rows of a part.
    """
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    count = tl.maximum(tl.minimum(chunk, rows - part * chunk), 0).to(tl.int32)
    x += part * chunk * channels
    # Distances from a value of the channel are small: squares of the values themselves would lose
    # the variance of a channel whose mean is large.
    near = tl.load(x + channel, mask=is_channel & (count > 0), other=0).to(tl.float32)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            row = start + i * ROWS + tl.arange(0, ROWS)
            inside = (row < count)[:, None] & is_channel[None, :]
            value = tl.load(x + row[:, None] * channels + channel[None, :], mask=inside, other=0)
            value = tl.where(inside, value.to(tl.float32) - near[None, :], 0)
            sums += value
            squares += value * value
    total, square = tl.sum(sums, 0), tl.sum(squares, 0)
    number = tl.maximum(count, 1)
    out += part * 2 * channels + channel
    tl.store(out, near + total / number, mask=is_channel)
    tl.store(out + channels, tl.maximum(square - total * total / number, 0), mask=is_channel)


@triton.jit(do_not_specialize=["rows", "chunk"])
def gradient_sums_kernel(
    gradient,
    x,
    mean,
    scale,
    bias,
    out,
    rows,
    channels,
    chunk,
    RELU: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """What BatchNorm's backward pass sums over the batch, of a part of the rows.

    Args:
        gradient, x: [rows, channels].
        mean, scale, bias: [channels] float32.
        out: [parts, 2, channels] float32: of gradients, and of gradients times (x - mean).
        chunk: rows of a part.
        RELU: gradients count where (x - mean) scale + bias is positive.
    """
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    count = tl.maximum(tl.minimum(chunk, rows - part * chunk), 0).to(tl.int32)
    x += part * chunk * channels
    gradient += part * chunk * channels
    centre = tl.load(mean + channel, mask=is_channel, other=0)
    if RELU:
        factor = tl.load(scale + channel, mask=is_channel, other=0)
        offset = tl.load(bias + channel, mask=is_channel, other=0)
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    products = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            row = start + i * ROWS + tl.arange(0, ROWS)
            inside = (row < count)[:, None] & is_channel[None, :]
            at = row[:, None] * channels + channel[None, :]
            flow = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
            value = tl.load(x + at, mask=inside, other=0).to(tl.float32) - centre[None, :]
            if RELU:
                flow = tl.where(value * factor[None, :] + offset[None, :] > 0, flow, 0)
            sums += flow
            products += flow * value
    out += part * 2 * channels + channel
    tl.store(out, tl.sum(sums, 0), mask=is_channel)
    tl.store(out + channels, tl.sum(products, 0), mask=is_channel)


@triton.jit
def max_pool_kernel(x, out, places, height, width, channels, rows_out, across, BLOCK: tl.constexpr):
    """Largest of 3 x 3 pixels around every second one: a program a row of a result, ``BLOCK`` values.

    Args:
        x: [n, height, width, channels].
        out: [n, rows_out, columns, channels].
        places: like ``out``, int8: which of the nine it is.
        across: columns times channels.
    """
    image = (tl.program_id(0) // rows_out).to(tl.int64)
    i = tl.program_id(0) % rows_out
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j, channel = at // channels, at % channels
    x += image * height * width * channels
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    # Should no pixel be larger than -inf, its own is.
    place = tl.full([BLOCK], 4, tl.int32)
    for k in tl.static_range(9):
        row, column = 2 * i - 1 + k // 3, 2 * j - 1 + k % 3
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (at < across)
        value = tl.load(
            x + (row * width + column) * channels + channel, mask=inside, other=float("-inf")
        ).to(tl.float32)
        better = (value > best) | (value != value)  # noqa: PLR0124 - not a number
        best = tl.where(better, value, best)
        place = tl.where(better, k, place)
    to = (image * rows_out + i) * across + at
    tl.store(out + to, best, mask=at < across)
    tl.store(places + to, place.to(tl.int8), mask=at < across)


@triton.jit
def _flow(gradient, places, at, inside):
    flow = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
    return flow, tl.load(places + at, mask=inside, other=-1).to(tl.int32)


@triton.jit
def max_pool_backward_kernel(
    gradient, places, out, height, width, channels, rows_in, across, BLOCK: tl.constexpr
):
    """Gradients of two by two pixels, each from the windows that it lies in.

    A program a row of windows and ``BLOCK`` values of it.

    Args:
        gradient: [n, rows_in, columns, channels].
        places: like ``gradient``, int8.
        out: [n, height, width, channels].
        across: columns times channels.
    """
    image = (tl.program_id(0) // rows_in).to(tl.int64)
    i = tl.program_id(0) % rows_in
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j, channel = at // channels, at % channels
    window = (image * rows_in + i) * across + at
    here, right = at < across, at + channels < across
    below = i + 1 < rows_in
    flow, place = _flow(gradient, places, window, here)
    flow_right, place_right = _flow(gradient, places, window + channels, right)
    flow_below, place_below = _flow(gradient, places, window + across, here & below)
    flow_last, place_last = _flow(gradient, places, window + across + channels, right & below)

    to = out + image * height * width * channels + (2 * i * width + 2 * j) * channels + channel
    two_wide, two_high = here & (2 * j + 1 < width), 2 * i + 1 < height
    tl.store(to, tl.where(place == 4, flow, 0), mask=here)
    value = tl.where(place == 5, flow, 0) + tl.where(place_right == 3, flow_right, 0)
    tl.store(to + channels, value, mask=two_wide)
    value = tl.where(place == 7, flow, 0) + tl.where(place_below == 1, flow_below, 0)
    tl.store(to + width * channels, value, mask=here & two_high)
    value = tl.where(place == 8, flow, 0) + tl.where(place_right == 6, flow_right, 0)
    value += tl.where(place_below == 2, flow_below, 0) + tl.where(place_last == 0, flow_last, 0)
    tl.store(to + (width + 1) * channels, value, mask=two_wide & two_high)


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
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    count = tl.maximum(tl.minimum(chunk, rows - part * chunk), 0).to(tl.int32)
    x += part * chunk * channels
    gradient += part * chunk * channels
    out += part * chunk * channels
    offset = tl.load(bias + channel, mask=is_channel, other=0)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            row = start + i * ROWS + tl.arange(0, ROWS)
            inside = (row < count)[:, None] & is_channel[None, :]
            at = row[:, None] * channels + channel[None, :]
            flow = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
            value = tl.load(x + at, mask=inside, other=0).to(tl.float32) + offset[None, :]
            near = tl.minimum(tl.maximum(value, -LIMIT), LIMIT)
            square = near * near
            series = square * 0 + SERIES[0]
            for k in tl.static_range(1, len(SERIES)):
                series = series * square + SERIES[k]
            below = tl.where(value > -LIMIT, tl.where(value < LIMIT, 0.5 + near * series, 1.0), 0.0)
            # exp2, which the GPU has as one instruction.
            density = 0.3989422804014327 * tl.exp2(value * value * -0.7213475204444817)
            flow *= below + value * density
            flow = tl.where(inside, flow, 0)
            total += flow
            tl.store(out + at, flow, mask=inside)
    tl.store(sums + part * channels + channel, tl.sum(total, 0), mask=is_channel)
