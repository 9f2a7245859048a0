"""Forward and backward pass of a micro-batch as one CUDA graph. Level 5.

A compiled step still launches some hundred kernels, one after the other, from Python. Recorded, the
GPU gets them at once, and neither gaps between kernels nor other work of this process hold it up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

_BEFORE_RECORDING = 3
"""Passes that run as usual: the compiler, cuBLAS and cuDNN choose their kernels then."""

Pass = Callable[..., tuple[torch.Tensor, ...]]
"""Takes tensors, computes gradients, returns tensors."""


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    outputs: tuple[torch.Tensor, ...]


class PassGraphs:
    """Runs passes as they are, and from the fourth of one shape on, recorded.

    There are two graphs: gradients of the first micro-batch of a step are written to memory of
    their own, those of further ones are added there. Other shapes (the last step of an epoch) run
    as they are. Everything that a pass reads besides its inputs must stay where it is.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._shape: tuple[torch.Size, ...] | None = None
        self._recorded: dict[bool, _Recorded] = {}
        self._gradients: list[torch.Tensor | None] = []

    def __call__(self, compute: Pass, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Do what ``compute(*inputs)`` does; the results hold until the next call.

        Args:
            compute: always the same function of its inputs and of the parameters' values.
            inputs: on the device.
        """
        shape = tuple(tensor.shape for tensor in inputs)
        if self._shape is None:
            self._seen[shape] += 1
            if self._seen[shape] > _BEFORE_RECORDING:
                self._shape = shape
        first = all(p.grad is None for p in self._parameters)
        if shape != self._shape or not (first or self._holds_gradients()):
            return compute(*inputs)
        if first not in self._recorded:
            self._recorded[first] = self._record(compute, inputs)
            if first:
                self._gradients = [p.grad for p in self._parameters]
        recorded = self._recorded[first]
        torch._foreach_copy_(recorded.inputs, list(inputs), non_blocking=True)
        recorded.graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return recorded.outputs

    def release(self) -> None:
        """Forget what was recorded; the next call records anew.

        NCCL waits for ever when it is left while a graph holds its operations, as after Ctrl-C, when
        the exception's frames hold whatever trained.
        """
        for recorded in self._recorded.values():
            recorded.graph.reset()
        self._recorded.clear()
        self._gradients.clear()

    def _holds_gradients(self) -> bool:
        """Whether gradients are where the second graph adds to them."""
        return bool(self._gradients) and all(
            p.grad is g for p, g in zip(self._parameters, self._gradients, strict=True)
        )

    def _record(self, compute: Pass, inputs: Sequence[torch.Tensor]) -> _Recorded:
        own = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        pool = self._recorded[True].graph.pool() if self._recorded else None
        # Other threads prepare batches and write checkpoints meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = compute(*own)
        return _Recorded(graph, own, outputs)
