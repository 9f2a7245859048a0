"""The process group: alone every function is the identity, together all ranks agree."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from lockstep import dist
from lockstep.errors import UserError
from tests.pool import on_group


def refuse() -> None:
    raise UserError("a = b: c")


def break_down() -> None:
    raise RuntimeError("bug")


def test_alone() -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert not dist.is_distributed()
    assert (dist.rank(), dist.world_size(), dist.local_world_size()) == (0, 1, 1)
    assert dist.is_main()
    dist.barrier()
    assert dist.all_reduce_sum_(tensor) is tensor and tensor.tolist() == [1.0, 2.0]
    assert dist.gather_objects("x") == ["x"]
    assert dist.broadcast_object("x") == "x"
    assert dist.together(lambda: 3) == dist.on_main(lambda: 3) == 3
    assert dist.on_main_only(lambda: 3, otherwise=4) == 3


@pytest.mark.parametrize("call", [dist.together, dist.on_main])
def test_mistakes_alone(call: Any) -> None:
    with pytest.raises(UserError, match="a = b: c"):
        call(refuse)
    with pytest.raises(RuntimeError, match="bug"):
        call(break_down)


def facts() -> dict[str, Any]:
    rank = dist.rank()
    message = {}
    for name, call in {
        "together": lambda: dist.together(refuse if rank == 1 else int),
        "on_main": lambda: dist.on_main(refuse),
        "on_main_only": lambda: dist.on_main_only(refuse, otherwise=None),
    }.items():
        try:
            call()
        except UserError as error:
            message[name] = str(error)
    dist.barrier()
    return {
        "place": (rank, dist.world_size(), dist.local_rank(), dist.local_world_size()),
        "sum": dist.all_reduce_sum_(torch.tensor([1.0, rank])).tolist(),
        "gathered": dist.gather_objects({"rank": rank}),
        "broadcast": dist.broadcast_object(f"from {rank}"),
        "together": dist.together(lambda: rank),
        "on_main": dist.on_main(lambda: f"by {rank}"),
        "on_main_only": dist.on_main_only(lambda: "file", otherwise="none"),
        "messages": message,
    }


def test_together(pool: Any) -> None:
    for rank, told in enumerate(pool(3, on_group, facts)):
        mistake = "a = b: c"
        assert told == {
            "place": (rank, 3, rank, 3),
            "sum": [3.0, 3.0],
            "gathered": [{"rank": 0}, {"rank": 1}, {"rank": 2}],
            "broadcast": "from 0",
            "together": rank,
            "on_main": "by 0",
            "on_main_only": "file" if rank == 0 else "none",
            "messages": dict.fromkeys(("together", "on_main", "on_main_only"), mistake),
        }


def join_and_leave(group_of_one: bool) -> list[Any]:
    seen: list[Any] = []
    for _ in range(2):
        device = dist.init("cpu", 60, group_of_one=group_of_one)
        total = dist.all_reduce_sum_(torch.ones(1)).item()
        seen.append((str(device), dist.is_distributed(), total))
        dist.shutdown()
        dist.shutdown()
        # A second group of this process needs a place of its own to meet.
        if "MASTER_PORT" in os.environ:
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return seen


@pytest.mark.parametrize(
    "world, group_of_one, expected",
    [
        pytest.param(1, False, ("cpu", False, 1.0), id="alone"),
        pytest.param(1, True, ("cpu", True, 1.0), id="a group of one"),
        pytest.param(2, False, ("cpu", True, 2.0), id="two"),
    ],
)
def test_join_and_leave(pool: Any, world: int, group_of_one: bool, expected: Any) -> None:
    assert pool(world, join_and_leave, group_of_one) == [[expected] * 2] * world
    assert not torch_dist.is_initialized()


@pytest.mark.parametrize(
    "device_type, name",
    [
        pytest.param("cpu", "gloo:all_reduce", id="gloo"),
        pytest.param(
            *("cuda", "nccl:all_reduce"),
            id="NCCL",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_flight_record(device_type: str, name: str) -> None:
    """torch has one recorder for NCCL and one for all else."""
    assert dist.flight_record() is None
    device = dist.init(device_type, 60, group_of_one=True)
    try:
        dist.all_reduce_sum_(torch.ones(2, device=device)).tolist()
        record = json.loads(dist.flight_record() or "{}")
    finally:
        dist.shutdown()
    assert name in [entry["profiling_name"] for entry in record["entries"]]


def sums(sizes: list[tuple[int, ...]]) -> list[Any]:
    """Of tensors that hold their place's number in a list of all numbers, plus rank."""
    found, wanted, at = [], [], 0
    for size in sizes:
        whole = torch.arange(at, at + math.prod(size), dtype=torch.float32).reshape(size)
        if len(size) == 4:
            whole = whole.to(memory_format=torch.channels_last)
        wanted.append(whole * dist.world_size() + sum(range(dist.world_size())))
        found.append(whole + dist.rank())
        at += whole.numel()
    buffer = torch.zeros(7)
    found.append(buffer[2:5].add_(dist.rank()))
    wanted.append(torch.full((3,), float(sum(range(dist.world_size())))))
    strides = [t.stride() for t in found]
    dist.all_reduce_sums_(found)
    assert [t.stride() for t in found] == strides
    assert buffer[:2].tolist() == [0, 0] and buffer[5:].tolist() == [0, 0]
    return [bool(a.equal(b)) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([(3,), (), (0, 2), (4, 3, 2, 2), (5, 7)], id="small"),
        pytest.param([(3,), (1024, 1024), (2,), (256, 3, 64, 32), (2**20 - 1,)], id="both"),
        pytest.param([], id="one"),
    ],
)
def test_sums(pool: Any, sizes: list[tuple[int, ...]]) -> None:
    assert pool(2, on_group, sums, sizes) == [[True] * (len(sizes) + 1)] * 2
