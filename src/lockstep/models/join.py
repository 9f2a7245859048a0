"""Gradients where a residual connection joins, in fewer bytes than the compiler finds. Level 2.

The gradient of ReLU(BatchNorm(x) + shortcut) comes in two parts, of the next block's convolution and
of its own shortcut. The compiler adds and masks them in one kernel; BatchNorm's sums, which it cannot
see into, read the result again. This pass over its graph puts them into one.

The gradient of what a Transformer's block adds to its stream begins where that of the LayerNorm
behind it ends: with stochastic depth's factor of each image, and the sum for the bias of the
branch's last layer. The pass hands both to LayerNorm's kernel, which has the values at hand.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from lockstep.models.tile import Tile, rows_of

_TILE = Tile(rows=16, channels=128, times=1, programs=528)
_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_CONVERT = torch.ops.prims.convert_element_type.default


class JoinGradients(CustomGraphPass):
    """For inductor's ``post_grad_custom_pre_pass``; leaves graphs alone that look otherwise."""

    def __call__(self, graph: Graph) -> None:
        """Replace what belongs into a kernel of ours, in place."""
        ops, nodes = torch.ops.lockstep, list(graph.nodes)
        found = [_join(graph, n) for n in nodes if n.target is ops.gradient_sums.default]
        found += [_hand_on(graph, n) for n in nodes if n.target is ops.norm_backward.default]
        if any(found):
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
    with graph.inserting_before(sums):
        both = _call(graph, torch.ops.lockstep.joined_gradient.default, *parts, rows, mean)
        flow, found = (_call(graph, getitem, both, i) for i in range(2))
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


def _hand_on(graph: Graph, norm: Node) -> bool:
    """Let LayerNorm's kernel make what the branch before it needs of the gradient."""
    flow = _item(norm, 0)
    branch = _branch(flow, norm) if _is_known(flow) else None
    if not branch:
        return False
    rows, kept = branch
    totals = _totals(rows)
    if kept:
        with graph.inserting_before(norm):
            new = _call(graph, norm.target, *norm.args[:-1], kept)
            rows.replace_all_uses_with(_call(graph, getitem, new, 1))
        norm.replace_all_uses_with(new)
        graph.erase_node(norm)
        norm = new
    for total in totals:
        value = total.meta["val"]
        with graph.inserting_before(total):
            found = _call(graph, _aten.select.int, _sums(graph, norm), 0, 2)
            found = _call(graph, _aten.reshape.default, found, list(value.shape))
            found = _call(graph, _CONVERT, found, value.dtype)
        total.replace_all_uses_with(found)
    return True


def _totals(rows: Node) -> list[Node]:
    return [n for n in rows.users if n.target is _aten.sum.dim_IntList and n.args[1] == [0]]


def _sums(graph: Graph, norm: Node) -> Node:
    """Over all parts; they are there already unless LayerNorm's parameters are frozen."""
    parts = _item(norm, 2) or _call(graph, getitem, norm, 2)
    users = (n for n in parts.users if n.target is _aten.sum.dim_IntList)
    found = next((n for n in users if n.args[1:] == ([0],)), None)
    return found or _call(graph, _aten.sum.dim_IntList, parts, [0])


def _item(node: Node, index: int) -> Node | None:
    found = (n for n in node.users if n.target is getitem and n.args[1] == index)
    return next(found, None)


def _branch(flow: Any, norm: Node) -> tuple[Node, Node | None] | None:
    """Rows of ``flow`` that are multiplied by something, and by what; or that are summed."""
    gradient: Any = norm.args[1]
    wanted = gradient.meta["val"]
    todo: list[tuple[Node, Node | None]] = [(flow, None)]
    while todo:
        node, kept = todo.pop()
        value = node.meta["val"]
        alike = (value.shape, value.dtype) == (wanted.shape, wanted.dtype)
        if alike and (kept or _totals(node)):
            return node, kept
        for user in node.users:
            if user.target in (*_RESHAPES, _CONVERT):
                todo.append((user, kept))
            elif user.target is _aten.mul.Tensor and not kept:
                factor = _factor_of_images(user, node, wanted.shape[1])
                if factor and not _needs(factor, norm):
                    todo.append((user, factor))
    return None


def _factor_of_images(product: Node, values: Node, channels: int) -> Node | None:
    """[n, 1, ...], by which [n, ..., channels] are multiplied."""
    others: list[Any] = [n for n in product.args if n is not values]
    if len(others) != 1 or not _is_known(others[0]):
        return None
    n, *rest = values.meta["val"].shape
    if len(rest) < 2 or rest[-1] != channels:
        return None
    return others[0] if tuple(others[0].meta["val"].shape) == (n, *[1] * len(rest)) else None


def _needs(node: Node, other: Node) -> bool:
    """Whether it is made of the other."""
    seen, todo = {node}, [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in seen]
        seen.update(new)
        todo += new
    return other in seen


def _is_known(node: Any) -> bool:
    """Whether it is an array whose sizes are numbers."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _call(graph: Graph, target: Any, *args: Any) -> Node:
    values = tuple(a.meta["val"] if isinstance(a, Node) else a for a in args)
    node: Node = graph.call_function(target, args)
    mode = detect_fake_mode(values[0])
    assert mode is not None
    with mode:
        node.meta["val"] = target(*values)
    # Without it the compiler hands our operators arguments of any strides.
    node.meta["eager_input_vals"] = (values, {})
    return node


def _are_alike(*nodes: Any) -> bool:
    """Whether all are images of one known size and type, channels last."""
    if not all(_is_known(node) for node in nodes):
        return False
    values = [node.meta["val"] for node in nodes]
    first = values[0]
    return all(
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
