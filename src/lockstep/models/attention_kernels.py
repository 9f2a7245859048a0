"""Kernels of attention over short sequences, in Triton: import only where there is a GPU. Level 2.

A program has one head of one image: queries, keys and values are read where the layer before wrote
them, and their gradients are written where it reads them. There are no atomic operations: the same
input has the same gradients.

Descriptors are of [images, tokens, 3 heads WIDTH], where those of queries come first, or of
[images, tokens, heads WIDTH]; blocks of [1, rows or keys, WIDTH]. Tokens past the last are read as
zeros.

Numbers of tokens and heads are no constants: ptxas 12.8, which Triton 3.6 has, leaves descriptors
of shared memory undefined in one variant of such code and not in another, and the GPU stops with an
illegal memory access. So the variants are few, and tests run each.

Backward is in Gluon, Triton's lower level: in Triton itself it took 1.6 times as long, as that
waits for every product and for every block that is read.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


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


WIDTH = gl.constexpr(64)
"""Of a head."""
BACKWARD_ROWS = gl.constexpr(32)
"""Queries at once."""
BACKWARD_KEYS = gl.constexpr(64)
"""Of a pass: with 64, registers and shared memory let three programs share a processor."""
_RING = gl.constexpr(2)
"""Blocks of queries that are there or on their way."""
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _WIDE.value, 2))
_FLAT = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
_LSE = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0]))
_LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLANE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_meet = getattr(gl, "barrier", None) or gl.thread_barrier  # its name until Triton 3.6


@gluon.jit
def _power_of_two(x):
    # Without the steps that tl.exp2 takes for results below 2^-126.
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _expect_keys(bars, there):
    mbarrier.expect(bars.index(0), BACKWARD_KEYS * WIDTH * 2, pred=there)
    mbarrier.expect(bars.index(1), BACKWARD_KEYS * WIDTH * 2, pred=there)


@gluon.jit
def _fetch_keys(keys, k, v, bars, image, first, column, values, there):
    at_k, at_v = [image, first, values // 2 + column], [image, first, values + column]
    tma.async_copy_global_to_shared(keys, at_k, bars.index(0), k, pred=there)
    tma.async_copy_global_to_shared(keys, at_v, bars.index(1), v, pred=there)


@gluon.jit
def _fetch(array, image, block, column, bars, ring, slot, there):
    at = [image, block * BACKWARD_ROWS, column]
    tma.async_copy_global_to_shared(array, at, bars.index(slot), ring.index(slot), pred=there)


@gluon.jit
def _two_dimensions(block):
    return block.reshape([block.shape[1], block.shape[2]])


@gluon.jit(do_not_specialize=["tokens", "heads"])
def attention_backward_kernel(
    gradients,
    queries,
    keys,
    outputs,
    lse,
    flow_queries,
    flow_keys,
    sums,
    factor,
    scale,
    tokens,
    heads,
    MOST: gl.constexpr,
    BLOCKS: gl.constexpr,
):
    """Gradients of queries, keys and values, and sums over an image of those of queries and values.

    Keys are taken in passes; in each, blocks of queries pass by. What queries have from the passes
    before is kept in shared memory, in 16 bits. Four warps.

    Args:
        gradients, outputs: descriptors of blocks of queries.
        queries, keys: descriptors of the same, of blocks of queries and of keys.
        lse: [images, heads, MOST] float32, of the kernel above.
        flow_queries, flow_keys: descriptors of what is written, as ``queries`` and ``keys``.
        sums: [images, 2, heads, WIDTH] float32, of the gradients as they are written, in 16 bits.
            That of all keys is zero: the same for each key changes no weight.
        factor: of the products of queries and keys: scores are to base 2.
        scale: the same to base e.
        MOST: tokens that there may be, a multiple of BACKWARD_ROWS.
        BLOCKS: of queries that there may be: BACKWARD_ROWS * BLOCKS >= tokens.
    """
    dtype: gl.constexpr = queries.dtype
    pair = gl.program_id(0)
    image, column = pair // heads, pair % heads * WIDTH
    values = 2 * heads * WIDTH  # the column of the first; keys' is half of it
    blocks = (tokens + BACKWARD_ROWS - 1) // BACKWARD_ROWS
    passes = (tokens + BACKWARD_KEYS - 1) // BACKWARD_KEYS
    turns = blocks * passes

    k_all = gl.allocate_shared_memory(dtype, [1, BACKWARD_KEYS, WIDTH], keys.layout)
    v_all = gl.allocate_shared_memory(dtype, [1, BACKWARD_KEYS, WIDTH], keys.layout)
    q_ring = gl.allocate_shared_memory(dtype, [_RING, 1, BACKWARD_ROWS, WIDTH], queries.layout)
    do_ring = gl.allocate_shared_memory(dtype, [_RING, 1, BACKWARD_ROWS, WIDTH], queries.layout)
    o_ring = gl.allocate_shared_memory(dtype, [_RING, 1, BACKWARD_ROWS, WIDTH], queries.layout)
    dq_all = gl.allocate_shared_memory(dtype, [BLOCKS, 1, BACKWARD_ROWS, WIDTH], queries.layout)
    ds_all = gl.allocate_shared_memory(
        dtype, [BACKWARD_KEYS, BACKWARD_ROWS], gl.NVMMASharedLayout(64, 16, 2)
    )
    lse_all = gl.allocate_shared_memory(gl.float32, [MOST // BACKWARD_ROWS, BACKWARD_ROWS], _LINES)
    delta_all = gl.allocate_shared_memory(
        gl.float32, [MOST // BACKWARD_ROWS, BACKWARD_ROWS], _LINES
    )
    bars_q = gl.allocate_shared_memory(gl.int64, [_RING, 1], mbarrier.MBarrierLayout())
    bars_do = gl.allocate_shared_memory(gl.int64, [_RING, 1], mbarrier.MBarrierLayout())
    bars_o = gl.allocate_shared_memory(gl.int64, [_RING, 1], mbarrier.MBarrierLayout())
    bars_keys = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())

    block_of = gl.arange(0, MOST // BACKWARD_ROWS, layout=gl.SliceLayout(1, _LSE))[:, None]
    row_of = gl.arange(0, BACKWARD_ROWS, layout=gl.SliceLayout(0, _LSE))[None, :]
    all_lse = gl.load(lse + pair * MOST + block_of * BACKWARD_ROWS + row_of)
    for i in gl.static_range(_RING):
        mbarrier.init(bars_q.index(i), count=1)
        mbarrier.init(bars_do.index(i), count=1)
        mbarrier.init(bars_o.index(i), count=1)
        mbarrier.init(bars_keys.index(i), count=1)
    _expect_keys(bars_keys, True)
    for i in gl.static_range(_RING):
        mbarrier.expect(bars_q.index(i), BACKWARD_ROWS * WIDTH * 2, pred=i < turns)
        mbarrier.expect(bars_do.index(i), BACKWARD_ROWS * WIDTH * 2, pred=i < turns)
        mbarrier.expect(bars_o.index(i), BACKWARD_ROWS * WIDTH * 2, pred=i < blocks)
    _fetch_keys(keys, k_all, v_all, bars_keys, image, 0, column, values, True)
    for i in gl.static_range(_RING):
        _fetch(queries, image, i, column, bars_q, q_ring, i, i < turns)
        _fetch(gradients, image, i, column, bars_do, do_ring, i, i < turns)
        _fetch(outputs, image, i, column, bars_o, o_ring, i, i < blocks)
    lse_all._reinterpret(gl.float32, [MOST // BACKWARD_ROWS, BACKWARD_ROWS], _PLANE).store(all_lse)

    k, v = _two_dimensions(k_all), _two_dimensions(v_all)
    spare_all = o_ring._reinterpret(dtype, [1, BACKWARD_KEYS, WIDTH], keys.layout)
    spare = _two_dimensions(spare_all)
    none = gl.zeros([BACKWARD_KEYS, BACKWARD_ROWS], gl.float32, _SCORES)
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, _WIDE))[:, None]
    channel = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, _WIDE))[None, :]
    sums += (image * 2 * heads) * WIDTH + column
    sums = sums + channel + row * 0  # of a block's shape, as the next
    is_top = (row == 0) & (channel >= 0)
    turn = 0
    for number in range(passes):
        is_last = number == passes - 1
        dk = gl.zeros([BACKWARD_KEYS, WIDTH], gl.float32, _WIDE)
        dv = gl.zeros([BACKWARD_KEYS, WIDTH], gl.float32, _WIDE)
        mbarrier.wait(bars_keys.index(0), number & 1)
        mbarrier.wait(bars_keys.index(1), number & 1)
        for block in range(blocks):
            slot, phase = turn & (_RING - 1), turn // _RING & 1
            slot_o, phase_o = block & (_RING - 1), block // _RING & 1
            q = _two_dimensions(q_ring.index(slot))
            do = _two_dimensions(do_ring.index(slot))
            most = lse_all.index(block).load(gl.SliceLayout(0, _SCORES))
            mbarrier.wait(bars_q.index(slot), phase)
            score = warpgroup_mma(k, q.permute([1, 0]), none, use_acc=False, is_async=True)
            mbarrier.wait(bars_do.index(slot), phase)
            dp = warpgroup_mma(v, do.permute([1, 0]), none, use_acc=False, is_async=True)
            if number == 0:
                # A query's weights are never here together. What they times their gradients sum up
                # to is its output times that one's gradient.
                mbarrier.wait(bars_o.index(slot_o), phase_o)
                o = _two_dimensions(o_ring.index(slot_o))
                both = do.load(_FLAT).to(gl.float32) * o.load(_FLAT).to(gl.float32)
                delta_all.index(block).store(gl.sum(both, 1))
                _meet()  # here, so that nobody waits in later passes
            score = warpgroup_mma_wait(1, deps=[score]) * factor - most[None, :]
            # Past the last key all are zeros, of which a finite weight makes nothing.
            score = gl.minimum(score, 0.0, propagate_nan=tl.PropagateNan.ALL)
            weight = _power_of_two(score)
            left = gl.convert_layout(weight.to(dtype), _LEFT)
            dv = warpgroup_mma(left, do, dv, is_async=True)
            delta = delta_all.index(block).load(gl.SliceLayout(0, _SCORES))
            dp = warpgroup_mma_wait(1, deps=[dp])
            ds = (weight * (dp - delta[None, :])).to(dtype)
            ds_all.store(ds)
            fence_async_shared()
            dk = warpgroup_mma(gl.convert_layout(ds, _LEFT), q, dk, is_async=True)
            # Tensor cores have 64 rows, and there are fewer queries: this is its transpose.
            nothing = gl.zeros([WIDTH, BACKWARD_ROWS], gl.float32, _SCORES)
            dq = warpgroup_mma(k.permute([1, 0]), ds_all, nothing, use_acc=False, is_async=True)
            # With two passes there are as many blocks as the ring has, or more.
            ahead = block + _RING
            ahead = gl.where(ahead < blocks, ahead, ahead - blocks)
            is_more = turn + _RING < turns
            is_more_o = (block + _RING < blocks) & (number == 0)
            mbarrier.expect(bars_q.index(slot), BACKWARD_ROWS * WIDTH * 2, pred=is_more)
            mbarrier.expect(bars_do.index(slot), BACKWARD_ROWS * WIDTH * 2, pred=is_more)
            mbarrier.expect(bars_o.index(slot_o), BACKWARD_ROWS * WIDTH * 2, pred=is_more_o)
            if is_last & (block > 0):
                before = dq_all.index(block - 1)
                at = [image, (block - 1) * BACKWARD_ROWS, column]
                tma.async_copy_shared_to_global(flow_queries, at, before)
            dv, dk, dq = warpgroup_mma_wait(0, deps=[dv, dk, dq])
            dq = dq * scale
            part = _two_dimensions(dq_all.index(block)).permute([1, 0])
            if number > 0:
                dq += part.load(_SCORES).to(gl.float32)
            # All have read this block now. The compiler counts a product's reads when it begins,
            # not when it ends, so that it would let the next block be written over it.
            _meet()
            part.store(dq.to(dtype))
            _fetch(queries, image, ahead, column, bars_q, q_ring, slot, is_more)
            _fetch(gradients, image, ahead, column, bars_do, do_ring, slot, is_more)
            _fetch(outputs, image, block + _RING, column, bars_o, o_ring, slot_o, is_more_o)
            if is_last:
                fence_async_shared()
            turn += 1
        # Keys of the next pass come while gradients of this one go, from where outputs were.
        _expect_keys(bars_keys, not is_last)
        tma.store_wait(0)
        first = number * BACKWARD_KEYS
        is_key = first + gl.arange(0, BACKWARD_KEYS, layout=gl.SliceLayout(1, _WIDE)) < tokens
        spare.store(gl.where(is_key[:, None], dv, 0.0).to(dtype))
        fence_async_shared()
        ones = gl.full([64, BACKWARD_KEYS], 1.0, dtype, _LEFT)
        nothing = gl.zeros([64, WIDTH], gl.float32, _WIDE)
        of_v = warpgroup_mma(ones, spare, nothing, use_acc=False, is_async=True)
        after = first + BACKWARD_KEYS
        _fetch_keys(keys, k_all, v_all, bars_keys, image, after, column, values, not is_last)
        if is_last:
            at = [image, (blocks - 1) * BACKWARD_ROWS, column]
            tma.async_copy_shared_to_global(flow_queries, at, dq_all.index(blocks - 1))
        tma.async_copy_shared_to_global(flow_keys, [image, first, values + column], spare_all)
        of_v = warpgroup_mma_wait(0, deps=[of_v])
        of_v += gl.load(sums + heads * WIDTH, mask=is_top & (number > 0), other=0.0)
        gl.store(sums + heads * WIDTH, of_v, mask=is_top)
        tma.store_wait(0)
        spare.store((dk * scale).to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(flow_keys, [image, first, values // 2 + column], spare_all)
    ones = gl.full([64, BACKWARD_ROWS], 1.0, dtype, _LEFT)
    of_q = gl.zeros([64, WIDTH], gl.float32, _WIDE)
    of_q = warpgroup_mma(ones, _two_dimensions(dq_all.index(0)), of_q, is_async=True)
    for block in range(1, blocks):
        of_q = warpgroup_mma(ones, _two_dimensions(dq_all.index(block)), of_q, is_async=True)
    gl.store(sums, warpgroup_mma_wait(0, deps=[of_q]), mask=is_top)
    tma.store_wait(0)
