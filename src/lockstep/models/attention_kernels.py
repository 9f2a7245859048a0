"""Kernels of attention over short sequences, in Triton: import only where there is a GPU. Level 2.

A program has one head of one image: queries, keys and values are read where the layer before wrote
them, and their gradients are written where it reads them. There are no atomic operations: the same
input has the same gradients.

Descriptors are of [images, tokens, 3 heads WIDTH], where those of queries come first, or of
[images, tokens, heads WIDTH]; blocks of [1, ROWS or KEYS, WIDTH]. Tokens past the last are read as zeros.

Numbers of tokens and heads are no constants: ptxas 12.8, which Triton 3.6 has, leaves descriptors of
shared memory undefined in one variant of this code and not in another (backward with STAGES=1 is
one), and the GPU stops with an illegal memory access. So the variants are few, and tests run each.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _read(array, image, first, column, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    return array.load([image, first, column]).reshape(ROWS, WIDTH)


@triton.jit
def _write(array, image, first, column, block):
    array.store([image, first, column], block.reshape(1, block.shape[0], block.shape[1]))


@triton.jit(do_not_specialize=["tokens", "heads"])
def attention_kernel(
    queries,
    keys,
    outputs,
    lse,
    factor,
    tokens,
    heads,
    SURE: tl.constexpr,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """softmax(q k^T) v of each head.

    Args:
        queries, keys: descriptors of the same.
        outputs: descriptor.
        lse: [images, heads, MOST] float32: log2 of the sum of 2^score.
        factor: of the products of queries and keys: scores are to base 2.
        SURE: tokens that there are at least, a multiple of 64.
        MOST: tokens that there may be, a multiple of ROWS.
        KEYS: a power of two, as many as tokens or more.
        ROWS: queries at once.
    """
    pair = tl.program_id(0)
    image, head = pair // heads, pair % heads
    lse += pair * MOST
    k = _read(keys, image, 0, (heads + head) * WIDTH, KEYS, WIDTH)
    v = _read(keys, image, 0, (2 * heads + head) * WIDTH, KEYS, WIDTH)
    key = tl.arange(0, KEYS)
    is_key = (key < SURE) | (key < tokens)  # the former is known to the compiler
    for first in tl.range(0, tokens, ROWS, num_stages=STAGES):
        q = _read(queries, image, first, head * WIDTH, ROWS, WIDTH)
        score = tl.dot(q, tl.trans(k)) * factor
        if KEYS > SURE:
            score = tl.where(is_key[None, :], score, float("-inf"))
        most = tl.max(score, 1)
        weight = tl.exp2(score - most[:, None])
        total = tl.sum(weight, 1)
        mix = tl.dot(weight.to(v.dtype), v) / total[:, None]
        _write(outputs, image, first, head * WIDTH, mix.to(v.dtype))
        token = first + tl.arange(0, ROWS)
        tl.store(lse + token, most + tl.log2(total))


@triton.jit(do_not_specialize=["tokens", "heads"])
def attention_backward_kernel(
    gradients,
    queries,
    keys,
    outputs,
    lse,
    scratch,
    flow,
    flow_keys,
    sums,
    factor,
    scale,
    tokens,
    heads,
    MOST: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of queries, keys and values, and their sums over an image.

    Args:
        gradients: descriptor, of the outputs.
        queries, keys, outputs: descriptors, as of the kernel above.
        lse: [images, heads, MOST] float32, of the kernel above.
        scratch: [images, heads, MOST] float32, to write to.
        flow: [images, tokens, 3, heads, WIDTH], and flow_keys: a descriptor of it.
        sums: [images, 2, heads, WIDTH] float32: of queries and values. That of all keys is zero: the
            same for each key changes no weight.
        factor: of the products of queries and keys: scores are to base 2.
        scale: the same to base e.
        MOST: tokens that there may be, a multiple of ROWS.
        KEYS: at once, a power of two; queries add up the gradients that they have of each part.
    """
    pair = tl.program_id(0)
    image, head = pair // heads, pair % heads
    flow += image.to(tl.int64) * (tokens * 3 * heads * WIDTH) + head * WIDTH
    sums += (image * 2 * heads + head) * WIDTH + tl.arange(0, WIDTH)
    lse += pair * MOST
    scratch += pair * MOST
    # A query's weights are never here together. What they times their gradients sum up to is its
    # output times that one's gradient.
    for first in tl.range(0, tokens, ROWS, num_stages=STAGES + 1):
        do = _read(gradients, image, first, head * WIDTH, ROWS, WIDTH)
        o = _read(outputs, image, first, head * WIDTH, ROWS, WIDTH)
        delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
        tl.store(scratch + first + tl.arange(0, ROWS), delta)
    tl.debug_barrier()  # threads read what others have written
    block = tl.arange(0, ROWS)[:, None] * (3 * heads * WIDTH) + tl.arange(0, WIDTH)[None, :]
    for start in range(0, tokens, KEYS):
        k = _read(keys, image, start, (heads + head) * WIDTH, KEYS, WIDTH)
        v = _read(keys, image, start, (2 * heads + head) * WIDTH, KEYS, WIDTH)
        dk = tl.zeros([KEYS, WIDTH], tl.float32)
        dv = tl.zeros([KEYS, WIDTH], tl.float32)
        for first in tl.range(0, tokens, ROWS, num_stages=STAGES):
            token = first + tl.arange(0, ROWS)
            q = _read(queries, image, first, head * WIDTH, ROWS, WIDTH)
            do = _read(gradients, image, first, head * WIDTH, ROWS, WIDTH)
            score = tl.dot(k, tl.trans(q)) * factor - tl.load(lse + token)[None, :]
            # Past the last key all are zeros, of which a finite weight makes nothing.
            weight = tl.exp2(tl.minimum(score, 0, propagate_nan=tl.PropagateNan.ALL))
            dp = tl.dot(v, tl.trans(do))
            delta = tl.load(scratch + token)
            dv = tl.dot(weight.to(do.dtype), do, dv)
            ds = (weight * (dp - delta[None, :])).to(q.dtype)
            dk = tl.dot(ds, q, dk)
            # Tensor cores have 64 rows, and there are fewer queries.
            dq = tl.trans(tl.dot(tl.trans(k), ds)) * scale
            at = flow + first * (3 * heads * WIDTH) + block
            inside = (token < tokens)[:, None]
            dq += tl.load(at, mask=inside & (start > 0), other=0)
            tl.store(at, dq, mask=inside)
        _write(flow_keys, image, start, (heads + head) * WIDTH, (dk * scale).to(k.dtype))
        _write(flow_keys, image, start, (2 * heads + head) * WIDTH, dv.to(k.dtype))
        is_key = (start + tl.arange(0, KEYS) < tokens)[:, None]
        of_v = tl.sum(tl.where(is_key, dv, 0), 0)
        of_v += tl.load(sums + heads * WIDTH, mask=start > 0, other=0)
        tl.store(sums + heads * WIDTH, of_v)
        tl.debug_barrier()
    total = tl.zeros([64, WIDTH], tl.float32)
    for first in tl.static_range(0, MOST, 64):
        token = first + tl.arange(0, 64)
        at = token[:, None] * (3 * heads * WIDTH) + tl.arange(0, WIDTH)[None, :]
        total += tl.load(flow + at, mask=(token < tokens)[:, None], other=0)
    tl.store(sums, tl.sum(total, 0))
