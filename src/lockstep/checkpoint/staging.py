"""Copies of the state in host memory, so that training may go on while they are written. Level 4."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

Tensors = dict[str, dict[str, torch.Tensor]]
"""Group ("model", "optimizer", "ema") to name to tensor: plain or DTensor, on any device."""


@dataclass(frozen=True)
class Staged:
    """Tensors on the host, complete after :meth:`wait`."""

    tensors: Tensors
    _arrived: torch.cuda.Event | None
    _sources: list[torch.Tensor]
    """What is copied from and would otherwise be freed."""

    def wait(self) -> None:
        """Block this thread until the copies have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._sources.clear()

    def fence(self) -> None:
        """Let the device finish the copies before it runs what is queued next; the host goes on."""
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)


class Staging:
    """Host memory for one copy of a rank's tensors, kept and used again by the next copy.

    From a GPU the copies run on a stream of their own into pinned memory, beside the kernels of the
    next step.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, tensors: Tensors) -> None:
        """Make the memory, which for pinned memory takes seconds."""
        for group, items in tensors.items():
            for name, tensor in items.items():
                self._buffer(f"{group}/{name}", _local(tensor))

    def copy(self, tensors: Tensors, changing: Collection[torch.Tensor]) -> Staged:
        """Begin a copy. The one before must have been written.

        Args:
            tensors: this rank's tensors or DTensors, of any device.
            changing: those that the next forward pass may write to, not only the next update.
        """
        early = {tensor.data_ptr() for tensor in changing if tensor.is_cuda}
        sources: list[torch.Tensor] = []
        staged: Tensors = {group: {} for group in tensors}
        on_gpu: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group, items in tensors.items():
            for name, tensor in items.items():
                local = _local(tensor)
                if local.data_ptr() in early:
                    local = local.clone()
                host = self._buffer(f"{group}/{name}", local)
                if local.is_cuda:
                    on_gpu.append((host, local))
                    sources.append(local)
                else:
                    host.copy_(local)
                staged[group][name] = _like(tensor, host)
        return Staged(staged, self._copy_beside(on_gpu), sources)

    def _copy_beside(
        self, pairs: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.cuda.Event | None:
        if not pairs:
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for host, local in pairs:
                host.copy_(local, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return arrived

    def _buffer(self, key: str, like: torch.Tensor) -> torch.Tensor:
        found = self._buffers.get(key)
        if found is None or found.shape != like.shape or found.dtype != like.dtype:
            # Not empty_like: a layout of the device (channels last) would be written to the file.
            found = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[key] = found
        return found


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _like(tensor: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
    """``host`` as the shard that ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return host
    # from_local() would move it to the device of the mesh; what is saved needs the place alone.
    shard: torch.Tensor = DTensor(host, tensor._spec, requires_grad=False)
    return shard
