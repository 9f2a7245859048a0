"""Kernels for GPUs, in Triton: import this file only where there is one. Level 2."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weight(x, BICUBIC: tl.constexpr):
    x = tl.abs(x)
    if BICUBIC:
        near = (1.5 * x - 2.5) * x * x + 1
        far = -0.5 * (((x - 5) * x + 8) * x - 4)
        return tl.where(x < 1, near, tl.where(x < 2, far, 0.0))
    return tl.maximum(1 - x, 0.0)


@triton.jit
def _whole(sums, weights):
    value = tl.floor(sums / tl.maximum(weights, 1e-12) + 0.5)
    return tl.minimum(tl.maximum(value, 0.0), 255.0)


@triton.jit
def resample_kernel(
    out, rows, numbers, mean, std, size, BLOCK: tl.constexpr, BICUBIC: tl.constexpr
):
    """One row of one result: a program a sample, row and ``BLOCK`` columns.

    Args:
        out: [m, S, S, 3] float32.
        rows: [n, 4] int64: address of the pixels, strides down, across and of channels.
        numbers: [n, 14] float32: ``Axis.numbers`` across, the same down, 1.0 where mirrored, and
            which of ``out`` it becomes.
        mean, std: [3] float32.
    """
    sample, y = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(rows + 4 * sample).to(tl.pointer_type(tl.uint8))
    down, across = tl.load(rows + 4 * sample + 1), tl.load(rows + 4 * sample + 2)
    channel_stride = tl.load(rows + 4 * sample + 3)
    row = numbers + 14 * sample
    radius = 2.0 if BICUBIC else 1.0

    step_y = tl.load(row + 7)
    scale_y = tl.maximum(step_y, 1.0)
    centre_y = tl.load(row + 6) + (y + 0.5) * step_y
    low_y = tl.maximum(tl.floor(centre_y - radius * scale_y + 0.5), tl.load(row + 8))
    high_y = tl.minimum(tl.floor(centre_y + radius * scale_y + 0.5), tl.load(row + 9))
    # Black: nothing to look at.
    high_y = tl.where(y >= tl.load(row + 10), high_y, low_y)
    high_y = tl.where(y < tl.load(row + 11), high_y, low_y)

    step_x = tl.load(row + 1)
    scale_x = tl.maximum(step_x, 1.0)
    centre_x = tl.load(row) + (x + 0.5) * step_x
    low_x = tl.maximum(tl.floor(centre_x - radius * scale_x + 0.5), tl.load(row + 2))
    high_x = tl.minimum(tl.floor(centre_x + radius * scale_x + 0.5), tl.load(row + 3))
    high_x = tl.where(x >= tl.load(row + 4), high_x, low_x)
    high_x = tl.where(x < tl.load(row + 5), high_x, low_x)
    low_x, high_x = low_x.to(tl.int32), high_x.to(tl.int32)
    taps_x = (2 * radius * scale_x + 2).to(tl.int32)

    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for source_y in range(low_y.to(tl.int32), high_y.to(tl.int32)):
        row_red = tl.zeros([BLOCK], tl.float32)
        row_green = tl.zeros([BLOCK], tl.float32)
        row_blue = tl.zeros([BLOCK], tl.float32)
        row_total = tl.zeros([BLOCK], tl.float32)
        for tap in range(taps_x):
            source_x = low_x + tap
            inside = (source_x < high_x) & (x < size)
            weights = _weight((source_x - centre_x + 0.5) / scale_x, BICUBIC)
            weights = tl.where(inside, weights, 0.0)
            pixel = source + source_y * down + source_x * across
            row_red += weights * tl.load(pixel, mask=inside, other=0).to(tl.float32)
            row_green += weights * tl.load(pixel + channel_stride, mask=inside, other=0).to(
                tl.float32
            )
            row_blue += weights * tl.load(pixel + 2 * channel_stride, mask=inside, other=0).to(
                tl.float32
            )
            row_total += weights
        weight_y = _weight((source_y - centre_y + 0.5) / scale_y, BICUBIC)
        red += weight_y * _whole(row_red, row_total)
        green += weight_y * _whole(row_green, row_total)
        blue += weight_y * _whole(row_blue, row_total)
        total += weight_y
    flipped = tl.load(row + 12) != 0
    place = tl.load(row + 13).to(tl.int64)
    to = out + ((place * size + y) * size + tl.where(flipped, size - 1 - x, x)) * 3
    for channel in tl.static_range(3):
        value = red if channel == 0 else (green if channel == 1 else blue)
        value = _whole(value, total)
        value = (value - tl.load(mean + channel)) / tl.load(std + channel)
        tl.store(to + channel, value, mask=x < size)


@triton.jit
def normalise_kernel(out, pixels, places, mean, std, count, BLOCK: tl.constexpr):
    """Squares of whole numbers, normalised: a program a square and ``BLOCK`` values.

    Args:
        out: [m, S, S, 3] float32.
        pixels: [n, S, S, 3] uint8.
        places: [n] int64: which of ``out`` each becomes.
        mean, std: [3] float32.
        count: values of a square.
    """
    sample = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(pixels + sample * count + at, mask=at < count, other=0).to(tl.float32)
    value = (value - tl.load(mean + at % 3)) / tl.load(std + at % 3)
    tl.store(out + tl.load(places + sample) * count + at, value, mask=at < count)
