"""Kernels of attention over short sequences, in Gluon: import only where there is a GPU. Level 2.

A program has one head of one image: queries, keys and values are read where the layer before wrote
them, and their gradients are written where it reads them. There are no atomic operations: the same
input has the same gradients.

Descriptors are of [images, tokens, 3 heads WIDTH], where those of queries come first, or of
[images, tokens, heads WIDTH]; blocks are of [1, some tokens, WIDTH]. Tokens past the last are read
as zeros.

Numbers of tokens and heads are no constants: ptxas 12.8, which Triton 3.6 has, leaves descriptors
of shared memory undefined in one variant of such code and not in another, and the GPU stops with an
illegal memory access. So the variants are few, and tests run each.

Gluon is Triton's lower level. Triton itself waits for every product and for every block that is
read: there backward took 1.6 times as long, and forward, over more keys than there are, 1.2 times.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

WIDTH = gl.constexpr(64)
"""Of a head."""
FORWARD_ROWS = gl.constexpr(64)
"""Queries of a block, as many as tensor cores have rows."""
BACKWARD_ROWS = gl.constexpr(32)
"""The same backward."""
BACKWARD_KEYS = gl.constexpr(64)
"""Of a pass: with 64, registers and shared memory let three programs share a processor."""
SWIZZLED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
"""Of blocks in shared memory: the places that tensor cores read from."""
_RING = gl.constexpr(2)
"""Blocks of queries that are there or on their way; forward counts on two."""
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
_WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_LEFT = gl.constexpr(gl.DotOperandLayout(0, _WIDE.value, 2))
_OF_ROWS = gl.constexpr(gl.SliceLayout(1, _WIDE.value))
_FLAT = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
_LSE = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [4, 1], [1, 0]))
_LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_PLANE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_meet = getattr(gl, "barrier", None) or gl.thread_barrier  # its name until Triton 3.6


def descriptor(array: torch.Tensor, tokens: int) -> TensorDescriptor:
    """Of [n, tokens, ...], 16 bits, of which blocks of so many tokens of a head are read."""
    return TensorDescriptor.from_tensor(array.flatten(2), [1, tokens, WIDTH.value], SWIZZLED)


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
    at = [image, block * ring.shape[2], column]
    tma.async_copy_global_to_shared(array, at, bars.index(slot), ring.index(slot), pred=there)


@gluon.jit
def _two_dimensions(block):
    return block.reshape([block.shape[1], block.shape[2]])


@gluon.jit
def _scores(q, k, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    none = gl.zeros([FORWARD_ROWS, SIZE], gl.float32, LAYOUT)
    return warpgroup_mma(q, k.permute([1, 0]), none, use_acc=False, is_async=True)


@gluon.jit
def _of_rows(x):
    # Moves nothing: a thread has the same rows, however many keys a piece has.
    return gl.convert_layout(x, _OF_ROWS)


@gluon.jit
def _weights(score, most, factor, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    return _power_of_two(
        score * factor - gl.convert_layout(most, gl.SliceLayout(1, LAYOUT))[:, None]
    )


@gluon.jit(do_not_specialize=["tokens", "heads"])
def attention_kernel(
    queries,
    keys_1,
    keys_2,
    keys_3,
    outputs,
    lse,
    factor,
    tokens,
    heads,
    MOST: gl.constexpr,
    KEYS_1: gl.constexpr,
    KEYS_2: gl.constexpr,
    KEYS_3: gl.constexpr,
):
    """softmax(q k^T) v of each head.

    All keys and values are in shared memory, in up to three pieces: sizes are powers of two, and one
    of all would be over many keys that there are not. Blocks of queries pass by; outputs are written
    from where their queries were. Four warps.

    Args:
        queries, keys_1, keys_2, keys_3: descriptors of the same, of blocks of queries and of each
            piece of keys. Those of pieces that there are not are not read.
        outputs: descriptor of blocks of queries.
        lse: [images, heads, MOST] float32: log2 of the sum of 2^score.
        factor: of the products of queries and keys, positive: scores are to base 2.
        MOST: tokens that there may be, a multiple of FORWARD_ROWS.
        KEYS_1, KEYS_2, KEYS_3: of each piece: powers of two, 0 where there is none. All but the last
            are full.
    """
    dtype: gl.constexpr = queries.dtype
    ALL: gl.constexpr = KEYS_1 + KEYS_2 + KEYS_3
    LAST: gl.constexpr = KEYS_3 or KEYS_2 or KEYS_1
    LAYOUT_OF_LAST: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LAST, 16])
    pair = gl.program_id(0)
    image, column = pair // heads, pair % heads * WIDTH
    at_k = heads * WIDTH + column
    at_v = 2 * heads * WIDTH + column
    blocks = (tokens + FORWARD_ROWS - 1) // FORWARD_ROWS

    q_ring = gl.allocate_shared_memory(dtype, [_RING, 1, FORWARD_ROWS, WIDTH], queries.layout)
    k_1 = gl.allocate_shared_memory(dtype, [1, KEYS_1, WIDTH], keys_1.layout)
    v_1 = gl.allocate_shared_memory(dtype, [1, KEYS_1, WIDTH], keys_1.layout)
    if KEYS_2:
        k_2 = gl.allocate_shared_memory(dtype, [1, KEYS_2, WIDTH], keys_2.layout)
        v_2 = gl.allocate_shared_memory(dtype, [1, KEYS_2, WIDTH], keys_2.layout)
    if KEYS_3:
        k_3 = gl.allocate_shared_memory(dtype, [1, KEYS_3, WIDTH], keys_3.layout)
        v_3 = gl.allocate_shared_memory(dtype, [1, KEYS_3, WIDTH], keys_3.layout)
    bars_q = gl.allocate_shared_memory(gl.int64, [_RING, 1], mbarrier.MBarrierLayout())
    bars_keys = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())

    for i in gl.static_range(_RING):
        mbarrier.init(bars_q.index(i), count=1)
        mbarrier.init(bars_keys.index(i), count=1)
    mbarrier.expect(bars_q.index(0), FORWARD_ROWS * WIDTH * 2)
    mbarrier.expect(bars_q.index(1), FORWARD_ROWS * WIDTH * 2, pred=blocks > 1)
    bar_k, bar_v = bars_keys.index(0), bars_keys.index(1)
    mbarrier.expect(bar_k, ALL * WIDTH * 2)
    mbarrier.expect(bar_v, ALL * WIDTH * 2)
    _fetch(queries, image, 0, column, bars_q, q_ring, 0, True)
    tma.async_copy_global_to_shared(keys_1, [image, 0, at_k], bar_k, k_1)
    if KEYS_2:
        tma.async_copy_global_to_shared(keys_2, [image, KEYS_1, at_k], bar_k, k_2)
    if KEYS_3:
        tma.async_copy_global_to_shared(keys_3, [image, KEYS_1 + KEYS_2, at_k], bar_k, k_3)
    tma.async_copy_global_to_shared(keys_1, [image, 0, at_v], bar_v, v_1)
    if KEYS_2:
        tma.async_copy_global_to_shared(keys_2, [image, KEYS_1, at_v], bar_v, v_2)
    if KEYS_3:
        tma.async_copy_global_to_shared(keys_3, [image, KEYS_1 + KEYS_2, at_v], bar_v, v_3)
    _fetch(queries, image, 1, column, bars_q, q_ring, 1, blocks > 1)
    mbarrier.wait(bar_k, 0)
    mbarrier.wait(bar_v, 0)

    lse += pair * MOST + gl.arange(0, FORWARD_ROWS, layout=_OF_ROWS)
    key = (ALL - LAST) + gl.arange(0, LAST, layout=gl.SliceLayout(0, LAYOUT_OF_LAST))
    is_key = key < tokens
    for block in range(blocks):
        slot = block & (_RING - 1)
        q_all = q_ring.index(slot)
        q = _two_dimensions(q_all)
        mbarrier.wait(bars_q.index(slot), block // _RING & 1)
        score_1 = _scores(q, _two_dimensions(k_1), KEYS_1)
        if KEYS_2:
            score_2 = _scores(q, _two_dimensions(k_2), KEYS_2)
        if KEYS_3:
            score_3 = _scores(q, _two_dimensions(k_3), KEYS_3)
        # Maxima leave NaN out. Weights do not, nor do their sums and outputs.
        if KEYS_3:
            score_1, score_2, score_3 = warpgroup_mma_wait(0, deps=[score_1, score_2, score_3])
            score_3 = gl.where(is_key[None, :], score_3, float("-inf"))
            most = gl.maximum(_of_rows(gl.max(score_1, 1)), _of_rows(gl.max(score_2, 1)))
            most = gl.maximum(most, _of_rows(gl.max(score_3, 1)))
        elif KEYS_2:
            score_1, score_2 = warpgroup_mma_wait(0, deps=[score_1, score_2])
            score_2 = gl.where(is_key[None, :], score_2, float("-inf"))
            most = gl.maximum(_of_rows(gl.max(score_1, 1)), _of_rows(gl.max(score_2, 1)))
        else:
            score_1 = warpgroup_mma_wait(0, deps=[score_1])
            score_1 = gl.where(is_key[None, :], score_1, float("-inf"))
            most = _of_rows(gl.max(score_1, 1))
        most = most * factor
        # Weights of a piece are computed while tensor cores have those of the one before.
        weight = _weights(score_1, most, factor, KEYS_1)
        total = _of_rows(gl.sum(weight, 1))
        left = gl.convert_layout(weight.to(dtype), _LEFT)
        none = gl.zeros([FORWARD_ROWS, WIDTH], gl.float32, _WIDE)
        mix = warpgroup_mma(left, _two_dimensions(v_1), none, use_acc=False, is_async=True)
        if KEYS_2:
            weight_2 = _weights(score_2, most, factor, KEYS_2)
            total += _of_rows(gl.sum(weight_2, 1))
            left_2 = gl.convert_layout(weight_2.to(dtype), _LEFT)
            mix = warpgroup_mma(left_2, _two_dimensions(v_2), mix, is_async=True)
        if KEYS_3:
            weight_3 = _weights(score_3, most, factor, KEYS_3)
            total += _of_rows(gl.sum(weight_3, 1))
            left_3 = gl.convert_layout(weight_3.to(dtype), _LEFT)
            mix = warpgroup_mma(left_3, _two_dimensions(v_3), mix, is_async=True)
        gl.store(lse + block * FORWARD_ROWS, most + gl.log2(total))
        mix = warpgroup_mma_wait(0, deps=[mix])
        # Outputs of the block before have gone: other queries may come to their place. That they are
        # to come is said here, and they are asked for when threads have waited for each other.
        tma.store_wait(0)
        is_more = (block > 0) & (block + 1 < blocks)
        mbarrier.expect(bars_q.index(1 - slot), FORWARD_ROWS * WIDTH * 2, pred=is_more)
        q.store((mix * (1.0 / total)[:, None]).to(dtype))
        fence_async_shared()
        at = [image, block * FORWARD_ROWS, column]
        tma.async_copy_shared_to_global(outputs, at, q_all)
        _fetch(queries, image, block + 1, column, bars_q, q_ring, 1 - slot, is_more)
    tma.store_wait(0)


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
            if dtype == gl.float16:  # in which a finite weight's gradient may be infinite
                key = number * BACKWARD_KEYS
                key += gl.arange(0, BACKWARD_KEYS, layout=gl.SliceLayout(1, _SCORES))
                weight = gl.where((key < tokens)[:, None], weight, 0.0)
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
