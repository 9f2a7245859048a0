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

from lockstep.models.tile import Tile, rows_of

_TILE = Tile(rows=16, channels=128, times=1, programs=528)
_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


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
    gradient: Any
    rows: Any
    mean: Any
    gradient, rows, mean, *_, relu = sums.args
    masked = _as_images(gradient)
    parts = _masked_addition(masked)
    if relu or not parts or not _are_alike(masked, *parts):
        return False
    args = (*parts, rows, mean)
    with graph.inserting_before(sums):
        both = graph.call_function(torch.ops.lockstep.joined_gradient.default, args)
        flow = graph.call_function(getitem, (both, 0))
        found = graph.call_function(getitem, (both, 1))
    values: list[Any] = [n.meta["val"] for n in args]
    with values[0].fake_mode:
        both.meta["val"] = joined_gradient(*values)
    flow.meta["val"], found.meta["val"] = both.meta["val"]
    masked.replace_all_uses_with(flow)
    sums.replace_all_uses_with(found)
    graph.erase_node(sums)
    return True


def _as_images(rows: Any) -> Any:
    """What ``rows_of`` made these rows of; None if anything else did."""
    node = _behind_copies(rows)
    if node.target not in _RESHAPES:
        return None
    node = _behind_copies(node.args[0])
    if node.target is not _aten.permute.default or list(node.args[1]) != [0, 2, 3, 1]:
        return None
    (n, c, h, w), wanted = node.args[0].meta["val"].shape, rows.meta["val"].shape
    return node.args[0] if tuple(wanted) == (n * h * w, c) else None


def _behind_copies(node: Any) -> Any:
    while node.target is _aten.clone.default:
        node = node.args[0]
    return node


def _masked_addition(node: Any) -> tuple[Node, Node, Node] | None:
    """a, b and y of where(y <= 0, 0, a + b)."""
    if node is None or node.target is not _aten.where.self:
        return None
    mask, zero, both = node.args
    if mask.target is not _aten.le.Scalar or mask.args[1] != 0 or not _is_zero(zero):
        return None
    if both.target is not _aten.add.Tensor or both.kwargs or len(both.users) > 1:
        return None
    a, b = both.args
    return a, b, mask.args[0]


def _is_zero(node: Any) -> bool:
    return node.target in (_aten.full.default, _aten.scalar_tensor.default) and node.args[-1] == 0


def _are_alike(*nodes: Any) -> bool:
    """Whether all are images of one known size and type, channels last."""
    if not all(isinstance(node, Node) for node in nodes):
        return False
    values = [node.meta.get("val") for node in nodes]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    first = values[0]
    return all(isinstance(size, int) for size in first.shape) and all(
        (value.shape, value.dtype) == (first.shape, first.dtype)
        and value.is_contiguous(memory_format=torch.channels_last)
        for value in values
    )


@torch.library.custom_op("lockstep::joined_gradient", mutates_args=(), device_types="cuda")
def joined_gradient(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """a + b where y is positive, else 0; and what ``gradient_sums`` sums of it.

    Args:
        a, b, y: [n, c, h, w], channels last. rows: [n h w, c]. mean: [c] float32.

    Returns:
        Like a; and [parts, 2, c] float32.
    """
    from lockstep.models.kernels import joined_gradient_kernel

    out, sums = _joined(a, b, y, rows)
    _TILE.launch(joined_gradient_kernel, a, b, y, rows, mean, out, sums, rows=rows)
    return out, sums


@joined_gradient.register_fake
def _joined(
    a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, rows: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(a, memory_format=torch.channels_last), _TILE.sums_like(rows, 2)


@joined_gradient.register_kernel("cpu")
def _(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    rows: torch.Tensor,
    mean: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.where(y <= 0, 0, a + b).contiguous(memory_format=torch.channels_last)
    flow, centred = rows_of(out).float(), rows.float() - mean
    return out, _TILE.sum_parts(torch.stack([flow, flow * centred], 1))
