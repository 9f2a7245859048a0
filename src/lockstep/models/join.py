"""Gradients where a residual connection joins, in fewer bytes than the compiler finds. Level 2.

The gradient of ReLU(BatchNorm(x) + shortcut) comes in two parts, of the next block's convolution and
of its own shortcut. The compiler adds and masks them in one kernel; BatchNorm's sums, which it cannot
see into, read the result again. This pass over its graph puts them into one.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from lockstep.models.tile import Tile

_TILE = Tile(rows=16, channels=128, times=1, programs=528)
_aten = torch.ops.aten
_VIEWS = {
    *(_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default),
    *(_aten.permute.default, _aten.clone.default),
}


class JoinGradients(CustomGraphPass):
    """For inductor's ``post_grad_custom_pre_pass``; leaves graphs alone that look otherwise."""

    def __call__(self, graph: Graph) -> None:
        """Replace every addition, mask and sum that are one kernel, in place."""
        changed = False
        for sums in [
            n for n in graph.nodes if n.target is torch.ops.lockstep.gradient_sums.default
        ]:
            changed |= _join(graph, sums)
        if changed:
            stable_topological_sort(graph)
            graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Of this file: what was compiled with another is not taken from the cache."""
        return get_hash_for_files((__file__,))


def _join(graph: Graph, sums: Node) -> bool:
    rows: Any
    gradient, rows, mean, *_, relu = sums.args
    masked = _behind_views(gradient)
    parts = _masked_addition(masked)
    if relu or not parts or not all(_lies_channels_last(part) for part in parts):
        return False
    chunk = _TILE.chunk(rows.meta["val"])
    args = (*parts, rows, mean, chunk)
    with graph.inserting_before(sums):
        both = graph.call_function(torch.ops.lockstep.joined_gradient.default, args)
        flow = graph.call_function(getitem, (both, 0))
        found = graph.call_function(getitem, (both, 1))
    values: list[Any] = [n.meta["val"] if isinstance(n, Node) else n for n in args]
    with values[0].fake_mode:
        both.meta["val"] = joined_gradient(*values)
    flow.meta["val"], found.meta["val"] = both.meta["val"]
    masked.replace_all_uses_with(flow)
    sums.replace_all_uses_with(found)
    graph.erase_node(sums)
    return True


def _behind_views(node: Any) -> Any:
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _masked_addition(node: Any) -> tuple[Node, Node, Node] | None:
    """a, b and y of where(y <= 0, 0, a + b)."""
    if node.target is not _aten.where.self:
        return None
    mask: Any
    mask, zero, both = node.args
    if mask.target is not _aten.le.Scalar or mask.args[1] != 0 or not _is_zero(zero):
        return None
    if both.target is not _aten.add.Tensor or both.kwargs or len(both.users) > 1:
        return None
    a, b = both.args
    return a, b, mask.args[0]


def _is_zero(node: Any) -> bool:
    return node.target in (_aten.full.default, _aten.scalar_tensor.default) and node.args[-1] == 0


def _lies_channels_last(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() != 4:
        return False
    known = all(isinstance(size, int) for size in value.shape)
    return known and value.is_contiguous(memory_format=torch.channels_last)


@torch.library.custom_op("lockstep::joined_gradient", mutates_args=(), device_types="cuda")
def joined_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """a + b where y is positive, else 0; and what ``gradient_sums`` sums of it.

    Args:
        a, b, y: [n, c, h, w], channels last. rows: [n h w, c]. mean: [c] float32.

    Returns:
        Like a; and [parts, 2, c] float32, of ``chunk`` rows each.
    """
    from lockstep.models.kernels import joined_gradient_kernel

    out, sums = _joined(a, b, y, rows)
    last = torch.channels_last
    a, b, y = (each.contiguous(memory_format=last) for each in (a, b, y))
    _TILE.launch(joined_gradient_kernel, a, b, y, rows, mean, out, sums, rows=rows, chunk=chunk)
    return out, sums


@joined_gradient.register_fake
def _joined(
    a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    c = rows.shape[1]
    sums = rows.new_empty((_TILE.parts(c), 2, c), dtype=torch.float32)
    return torch.empty_like(a, memory_format=torch.channels_last), sums


@joined_gradient.register_kernel("cpu")
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, sums = _joined(a, b, y, rows)
    out.copy_(torch.where(y <= 0, 0, a + b))
    flow = out.permute(0, 2, 3, 1).reshape(rows.shape).float()
    centred = rows.float() - mean
    for part, some, of in zip(sums.zero_(), flow.split(chunk), centred.split(chunk), strict=False):
        part[0] = some.sum(0)
        part[1] = (some * of).sum(0)
    return out, sums
