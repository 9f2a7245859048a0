"""The process group: the only file that knows ranks.

Without a process group (one process) every function is the identity, so callers have one path.
Level 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch.distributed.tensor import DTensor

from lockstep.errors import UserError

T = TypeVar("T")


def init(device_type: str, timeout_seconds: float, *, group_of_one: bool) -> torch.device:
    """Join the process group that the environment describes and return this process's device.

    The variables are torchrun's (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``,
    ``MASTER_PORT``). CUDA tensors go through NCCL and CPU tensors through gloo, so that checkpoints
    and object exchange never touch the GPU.

    Args:
        group_of_one: make a group without ``WORLD_SIZE``, too: FSDP needs one even when alone.
    """
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", local_rank())
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {}
    if "WORLD_SIZE" not in os.environ:
        store = torch_dist.HashStore()  # type: ignore[attr-defined]
        alone = {"store": store, "rank": 0, "world_size": 1}
    if group_of_one or not alone:
        torch_dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device_type == "cuda" else None,
            **alone,
        )
    return device


def shutdown() -> None:
    """Leave the process group. Not a barrier: a failed peer must not keep us waiting."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def is_distributed() -> bool:
    return torch_dist.is_available() and torch_dist.is_initialized()


def rank() -> int:
    return torch_dist.get_rank() if is_distributed() else 0


def world_size() -> int:
    return torch_dist.get_world_size() if is_distributed() else 1


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes of this run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if is_distributed() else 1


def is_main() -> bool:
    return rank() == 0


def barrier() -> None:
    """All ranks enter here. Through gloo: it must not wait for the GPU's queue."""
    if is_distributed():
        all_reduce_sum_(torch.zeros(1))


def all_reduce_sum_(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place. All ranks enter here."""
    if is_distributed():
        torch_dist.all_reduce(tensor)
    return tensor


_JOINED_BELOW = 1 << 20
"""Numbers from which on a tensor is sent where it lies. NCCL sends a group of many small ones slowly,
and copying large ones costs more than it wins; where between 2**18 and all is best, is a guess."""


def all_reduce_sums_(tensors: Sequence[torch.Tensor]) -> None:
    """Sum each over ranks, in place, as one operation. All ranks enter here.

    Args:
        tensors: of one dtype and device, each without gaps in memory, in any order of dimensions.
    """
    if not is_distributed() or not tensors:
        return
    large = [t for t in tensors if t.numel() >= _JOINED_BELOW]
    small = [_in_memory(t) for t in tensors if t.numel() < _JOINED_BELOW]
    joined = [torch.cat(small)] if small else []
    # all_reduce_coalesced, which this replaces, is deprecated.
    with torch_dist.distributed_c10d._coalescing_manager():
        for tensor in [*large, *joined]:
            torch_dist.all_reduce(tensor)
    for whole in joined:
        torch._foreach_copy_(small, list(whole.split([t.numel() for t in small])))


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor without gaps as they lie, 1-d."""
    return tensor.as_strided((tensor.numel(),), (1,))


def gather_objects(obj: T) -> list[T]:
    """Every rank's plain object, in rank order, on every rank. All ranks enter here."""
    if not is_distributed():
        return [obj]
    out: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(out, obj)
    return out


def broadcast_object(obj: T) -> T:
    """Rank 0's plain object, on every rank. All ranks enter here."""
    if not is_distributed():
        return obj
    box = [obj]
    torch_dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box[0]


def broadcast_(tensor: torch.Tensor) -> torch.Tensor:
    """Rank 0's values, in place. All ranks enter here."""
    if is_distributed():
        torch_dist.broadcast(tensor, src=0)
    return tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def flight_record() -> str | None:
    """The last collectives of this process as JSON (torch's flight recorder), if it has any.

    torch keeps those of NCCL apart from gloo's, in a recorder of their own; they come first.
    """
    if not is_distributed():
        return None
    record: dict[str, Any] = {}
    entries: list[Any] = []
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        dump = getattr(torch._C._distributed_c10d, name, None)
        if dump is not None:
            told = json.loads(dump(True, False))
            entries += told.pop("entries", [])
            record = told | record
    return json.dumps(record | {"entries": entries})


def any_rank(flag: bool) -> bool:
    """Whether it is true on any rank. All ranks enter here."""
    return bool(all_reduce_sum_(torch.tensor([float(flag)])).item() > 0)


def together(work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and fail on every rank if one of them meets a user's mistake.

    All ranks enter here. Without it the other ranks would wait in the next collective for a rank
    that has already left. Other exceptions leave at once: the launcher ends the peers.
    """
    error, result = _attempt(work)
    first = next((e for e in gather_objects(error) if e is not None), None)
    if first is not None:
        raise UserError(first)
    return result  # type: ignore[return-value]


def on_main(work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 and return its result, or raise its UserError, on every rank.

    The result must be a plain object. All ranks enter here.
    """
    error, result = broadcast_object(_attempt(work) if is_main() else (None, None))
    if error is not None:
        raise UserError(error)
    return result  # type: ignore[return-value]


def on_main_only(work: Callable[[], T], *, otherwise: T) -> T:
    """``work()`` on rank 0 and ``otherwise`` elsewhere; its UserError is raised on every rank.

    For results that cannot travel (open files). All ranks enter here.
    """
    return together(lambda: work() if is_main() else otherwise)


def _attempt(work: Callable[[], T]) -> tuple[str | None, T | None]:
    """The user's mistake that it meets, and the result."""
    try:
        return None, work()
    except UserError as exc:
        return str(exc), None
