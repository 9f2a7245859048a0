"""Models whose weights are drawn later, where they belong (``model.draw=parameter``).

timm draws a model's weights one after the other from one stream of random numbers: minutes on one
core for billions of them, in each process, into a whole copy in host memory. Here the model is
built with parameters on the meta device while what its code does to them is written down; each
parameter then gets a generator of its own and repeats its part: several at a time, and only one
parameter whole at once, whatever the strategy shards. Buffers (rope tables) are real from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from lockstep import dist
from lockstep.errors import UserError
from lockstep.machine import cores

_PROGRAMS = "lockstep_programs"
_OVERWRITES = {"aten::normal_", "aten::uniform_", "aten::fill_", "aten::zero_", "aten::copy_"}
_EMPTY = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"}
_MAX_THREADS = 16
"""Each holds one parameter whole: 0.2 GB for the largest of a 7 B ViT."""


@dataclass(frozen=True)
class _Write:
    """One in-place operation on a parameter, or on a view of it."""

    operator: Any
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self, whole: torch.Tensor, generator: torch.Generator) -> None:
        draws = any(a.name == "generator" for a in self.operator._schema.arguments)
        extra = {"generator": generator} if draws else {}
        view = whole.as_strided(self.size, self.stride, self.offset)
        self.operator(view, *self.args, **self.kwargs | extra)


class _Recorder(TorchDispatchMode):
    """Writes down what happens to the parameters of the models built within."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.programs: dict[int, list[_Write]] = {}
        self.refused: str | None = None
        self._unwritten: set[int] = set()
        """Storages that hold nothing yet."""
        self._metas: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        if func._schema.is_mutable and given:
            self._note(func, args, kwargs, given[1:])
        elif isinstance(out, torch.Tensor) and _key(out) not in map(_key, given):
            # An address may have been another storage's before.
            self._unwritten.discard(_key(out))
            if func._schema.name in _EMPTY:
                self._unwritten.add(_key(out))
        return out

    def defer(self, parameter: nn.Parameter) -> nn.Parameter:
        """Its substitute on the meta device; the same for the same parameter."""
        if parameter not in self._metas:
            values = parameter.detach()
            substitute = torch.empty_strided(
                values.size(), values.stride(), dtype=values.dtype, device="meta"
            )
            self.programs[_key(substitute)] = []
            if _key(values) not in self._unwritten:
                substitute.copy_(values)  # noted like any other
            self._metas[parameter] = nn.Parameter(substitute, parameter.requires_grad)
        return self._metas[parameter]  # type: ignore[no-any-return]

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], others: list[torch.Tensor]
    ) -> None:
        target = args[0]
        self._unwritten.discard(_key(target))
        program = self.programs.get(_key(target))
        if program is None:
            return
        if any(other.is_meta for other in others):
            self.refused = f"{func._schema.name} needs values that are not there yet"
        if func._schema.name in _OVERWRITES and target.numel() * target.element_size() == (
            target.untyped_storage().nbytes()
        ):
            program.clear()
        place = target.size(), target.stride(), target.storage_offset()
        program.append(_Write(func, *place, args[1:], kwargs))


def build_deferred(create: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model that ``create`` makes, to be given its weights by :func:`fill`.

    Raises:
        UserError: its weights depend on one another, or are made in another unusual way.
    """
    recorder = _Recorder()
    with _parameters_by(recorder.defer), recorder:
        model = create()
    programs: dict[str, list[_Write]] = {}
    for name, parameter in model.named_parameters():
        programs[name] = recorder.programs.get(_key(parameter), [])
        if not programs[name]:
            recorder.refused = f"{name} is given no values"
    if recorder.refused:
        raise UserError(
            f"model.draw = parameter: {type(model).__name__} cannot be drawn that way "
            f"({recorder.refused}): use model.draw=model"
        )
    setattr(model, _PROGRAMS, (seed, programs))
    return model


def is_deferred(model: nn.Module) -> bool:
    """Whether the weights are still to be drawn."""
    return hasattr(model, _PROGRAMS)


def fill(model: nn.Module, device: torch.device) -> nn.Module:
    """Draw the weights of a deferred model on ``device``, each rank its own shards; else nothing.

    Values are drawn on the CPU and do not depend on the device, the shards or the threads.
    """
    if not is_deferred(model):
        return model
    seed, programs = getattr(model, _PROGRAMS)
    buffers = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    model.to_empty(device=device)
    for module, name, buffer in buffers:
        setattr(module, name, buffer.to(device))
    jobs = [(parameter, seed, name, programs[name]) for name, parameter in model.named_parameters()]
    threads = max(1, min(_MAX_THREADS, cores() // dist.local_world_size()))
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(lambda job: _draw(*job), jobs):
            pass
    delattr(model, _PROGRAMS)
    return model


@torch.no_grad()
def _draw(parameter: nn.Parameter, seed: int, name: str, program: list[_Write]) -> None:
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    here = not isinstance(parameter, DTensor) and parameter.is_cpu and parameter.is_contiguous()
    whole = parameter if here else torch.empty(parameter.shape, dtype=parameter.dtype)
    for write in program:
        write.repeat(whole, generator)
    if not isinstance(parameter, DTensor):
        if not here:
            parameter.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    own = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    parameter.to_local().copy_(own)


@contextmanager
def _parameters_by(defer: Callable[[nn.Parameter], nn.Parameter]) -> Iterator[None]:
    """Modules built within hold what ``defer`` makes of their parameters."""
    register = nn.Module.register_parameter

    def deferring(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # Not a subclass: whoever wrote it means to do something of its own.
        plain = type(parameter) is nn.Parameter and not parameter.is_meta
        register(module, name, defer(parameter) if plain else parameter)  # type: ignore[arg-type]

    with patch.object(nn.Module, "register_parameter", deferring):
        yield


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
