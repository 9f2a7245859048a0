"""Kernels for GPUs, in Triton: import this file only where there is one. Level 2.

Activations lie channels last: [rows, channels], where a row is a pixel of an image. Sums over rows
are taken in parts, each by one program, which reads its rows from first to last.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of_program(rows, channels, chunk, CHANNELS: tl.constexpr):
    """Of this program: its number, its channels, which of them there are, and how many rows."""
    part = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    count = tl.maximum(tl.minimum(chunk, rows - part * chunk), 0).to(tl.int32)
    return part, channel, channel < channels, count


@triton.jit
def block_of(start, count, channel, channels, ROWS: tl.constexpr):
    """[rows, channels]: where values lie from the part's first, and which of them there are."""
    row = start + tl.arange(0, ROWS)
    inside = (row < count)[:, None] & (channel < channels)[None, :]
    return row[:, None] * channels + channel[None, :], inside


@triton.jit(do_not_specialize=["rows", "chunk"])
def moments_kernel(
    x,
    near,
    out,
    rows,
    channels,
    chunk,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """Sums of what rows are apart from the mean of the first ``ROWS``, and of its square.

    Args:
        x: [rows, channels].
        near: [channels] float32, that mean.
        out: [parts, 2, channels] float32.
        chunk: rows of a part.
    """
    part, channel, is_channel, count = rows_of_program(rows, channels, chunk, CHANNELS)
    at, inside = block_of(0, rows, channel, channels, ROWS)
    middle = tl.sum(tl.load(x + at, mask=inside, other=0).to(tl.float32), 0)
    middle /= tl.minimum(rows, ROWS)
    tl.store(near + channel, middle, mask=is_channel & (part == 0))
    x += part * chunk * channels
    sums = tl.zeros([ROWS, CHANNELS], tl.float32)
    squares = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            at, inside = block_of(start + i * ROWS, count, channel, channels, ROWS)
            value = tl.load(x + at, mask=inside, other=0).to(tl.float32)
            value = tl.where(inside, value - middle[None, :], 0)
            sums += value
            squares += value * value
    out += part * 2 * channels + channel
    tl.store(out, tl.sum(sums, 0), mask=is_channel)
    tl.store(out + channels, tl.sum(squares, 0), mask=is_channel)


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
    part, channel, is_channel, count = rows_of_program(rows, channels, chunk, CHANNELS)
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
            at, inside = block_of(start + i * ROWS, count, channel, channels, ROWS)
            flow = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
            value = tl.load(x + at, mask=inside, other=0).to(tl.float32) - centre[None, :]
            if RELU:
                flow = tl.where(value * factor[None, :] + offset[None, :] > 0, flow, 0)
            sums += flow
            products += flow * value
    out += part * 2 * channels + channel
    tl.store(out, tl.sum(sums, 0), mask=is_channel)
    tl.store(out + channels, tl.sum(products, 0), mask=is_channel)


@triton.jit(do_not_specialize=["rows", "chunk"])
def joined_gradient_kernel(
    a,
    b,
    y,
    x,
    mean,
    out,
    sums,
    rows,
    channels,
    chunk,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TIMES: tl.constexpr,
):
    """a + b where y is positive, and what BatchNorm sums of it, of a part of the rows.

    Args:
        a, b, y, x, out: [rows, channels].
        mean: [channels] float32.
        sums: [parts, 2, channels] float32: of the result, and of the result times (x - mean).
        chunk: rows of a part.
    """
    part, channel, is_channel, count = rows_of_program(rows, channels, chunk, CHANNELS)
    begin = part * chunk * channels
    a, b, y, x, out = a + begin, b + begin, y + begin, x + begin, out + begin
    centre = tl.load(mean + channel, mask=is_channel, other=0)
    total = tl.zeros([ROWS, CHANNELS], tl.float32)
    products = tl.zeros([ROWS, CHANNELS], tl.float32)
    for start in range(0, count, ROWS * TIMES):
        for i in tl.static_range(TIMES):
            at, inside = block_of(start + i * ROWS, count, channel, channels, ROWS)
            flow = tl.load(a + at, mask=inside, other=0).to(tl.float32)
            flow += tl.load(b + at, mask=inside, other=0).to(tl.float32)
            flow = tl.where(tl.load(y + at, mask=inside, other=0) <= 0, 0, flow)
            # What is summed is what is stored.
            rounded = flow.to(out.dtype.element_ty)
            tl.store(out + at, rounded, mask=inside)
            flow = rounded.to(tl.float32)
            value = tl.load(x + at, mask=inside, other=0).to(tl.float32) - centre[None, :]
            total += flow
            products += flow * value
    sums += part * 2 * channels + channel
    tl.store(sums, tl.sum(total, 0), mask=is_channel)
    tl.store(sums + channels, tl.sum(products, 0), mask=is_channel)


@triton.jit
def norm_max_pool_kernel(
    x,
    mean,
    scale,
    bias,
    out,
    places,
    chosen,
    height,
    width,
    channels,
    rows_out,
    across,
    BLOCK: tl.constexpr,
):
    """Largest ReLU((x - mean) scale + bias) of 3 x 3 pixels around every second one.

    A program a row of a result, and ``BLOCK`` values of it.

    Args:
        x: [n, height, width, channels].
        mean, scale, bias: [channels] float32.
        out: [n, rows_out, columns, channels].
        places: like ``out``, int8: which of the nine it is, 9 where none is positive.
        chosen: like ``out``: its x.
        across: columns times channels.
    """
    image = (tl.program_id(0) // rows_out).to(tl.int64)
    i = tl.program_id(0) % rows_out
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j, channel = at // channels, at % channels
    x += image * height * width * channels
    centre, factor = tl.load(mean + channel), tl.load(scale + channel)
    offset = tl.load(bias + channel)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    of = tl.zeros([BLOCK], tl.float32)
    place = tl.full([BLOCK], 9, tl.int32)
    for k in tl.static_range(9):
        row, column = 2 * i - 1 + k // 3, 2 * j - 1 + k % 3
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width) & (at < across)
        value = tl.load(x + (row * width + column) * channels + channel, mask=inside, other=0).to(
            tl.float32
        )
        result = (value - centre) * factor + offset
        # The second: not a number.
        better = inside & ((result > best) | (result != result))  # noqa: PLR0124
        best = tl.where(better, result, best)
        of = tl.where(better, value, of)
        place = tl.where(better, k, place)
    to = (image * rows_out + i) * across + at
    none = best <= 0
    tl.store(out + to, tl.where(none, 0, best), mask=at < across)
    tl.store(places + to, tl.where(none, 9, place).to(tl.int8), mask=at < across)
    tl.store(chosen + to, of, mask=at < across)


@triton.jit
def _flow(gradient, places, at, inside):
    flow = tl.load(gradient + at, mask=inside, other=0).to(tl.float32)
    return flow, tl.load(places + at, mask=inside, other=9).to(tl.int32)


@triton.jit
def _store_normed(out, x, flow, centre, factor, shift, slope, inside):
    value = tl.load(x, mask=inside, other=0).to(tl.float32)
    tl.store(out, (flow - shift - (value - centre) * slope) * factor, mask=inside)


@triton.jit
def norm_max_pool_backward_kernel(
    gradient,
    places,
    x,
    mean,
    scale,
    shift,
    slope,
    out,
    height,
    width,
    channels,
    rows_in,
    across,
    BLOCK: tl.constexpr,
):
    """(flow - shift - (x - mean) slope) scale: each pixel's flow from the windows that it lies in.

    A program a row of windows and ``BLOCK`` values of it: the pixels at and right and below of each
    window's centre.

    Args:
        gradient: [n, rows_in, columns, channels].
        places: like ``gradient``, int8.
        x, out: [n, height, width, channels].
        mean, scale, shift, slope: [channels] float32.
        across: columns times channels.
    """
    image = (tl.program_id(0) // rows_in).to(tl.int64)
    i = tl.program_id(0) % rows_in
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    j, channel = at // channels, at % channels
    centre, factor = tl.load(mean + channel), tl.load(scale + channel)
    down, tilt = tl.load(shift + channel), tl.load(slope + channel)
    window = (image * rows_in + i) * across + at
    here, right = at < across, at + channels < across
    below = i + 1 < rows_in
    flow, place = _flow(gradient, places, window, here)
    flow_right, place_right = _flow(gradient, places, window + channels, right)
    flow_below, place_below = _flow(gradient, places, window + across, here & below)
    flow_last, place_last = _flow(gradient, places, window + across + channels, right & below)

    pixel = image * height * width * channels + (2 * i * width + 2 * j) * channels + channel
    x, out = x + pixel, out + pixel
    two_wide, two_high = here & (2 * j + 1 < width), 2 * i + 1 < height
    value = tl.where(place == 4, flow, 0)
    _store_normed(out, x, value, centre, factor, down, tilt, here)
    value = tl.where(place == 5, flow, 0) + tl.where(place_right == 3, flow_right, 0)
    _store_normed(out + channels, x + channels, value, centre, factor, down, tilt, two_wide)
    value = tl.where(place == 7, flow, 0) + tl.where(place_below == 1, flow_below, 0)
    step = width * channels
    _store_normed(out + step, x + step, value, centre, factor, down, tilt, here & two_high)
    value = tl.where(place == 8, flow, 0) + tl.where(place_right == 6, flow_right, 0)
    value += tl.where(place_below == 2, flow_below, 0) + tl.where(place_last == 0, flow_last, 0)
    step += channels
    _store_normed(out + step, x + step, value, centre, factor, down, tilt, two_wide & two_high)
