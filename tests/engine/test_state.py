"""What a checkpoint holds is all there is: restored and uninterrupted go on alike."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from timm.optim import list_optimizers
from torch import nn

from lockstep.config.schema import Ema
from lockstep.engine.state import Progress, TrainState
from lockstep.errors import UserError
from lockstep.optim.build import _torch_optimizers
from lockstep.optim.ema import WeightAverage
from tests.toys import network, optimizer_config, precision, state_of

OPTIMIZERS = sorted({*_torch_optimizers(), *map(str, list_optimizers())})


def state_with(optimizer: str, *, ema: bool = False, **changes: Any) -> TrainState:
    state, _ = state_of(
        network(batchnorm=True),
        optimizer=optimizer_config(optimizer, lr=0.01, **changes),
        number_format=precision("fp16"),
    )
    if ema:
        cfg = Ema(enabled=True, decay=0.9, warmup=True)
        state.ema = WeightAverage(state.model, state.statistics.buffers, cfg)
    return state


def train(state: TrainState, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 4, 4, generator=generator)
        targets = torch.randint(5, (8,), generator=generator)
        nn.functional.cross_entropy(state.module(images), targets).backward()
        for group in state.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        torch.manual_seed(step)  # some optimisers draw numbers
        state.optimizer.step()
        state.optimizer.zero_grad()
        state.progress.step = step + 1
        if state.ema is not None:
            state.ema.update(state.progress.step)


def saved(state: TrainState) -> tuple[Any, Any]:
    tensors, meta = state.to_save()
    return copy.deepcopy(tensors), json.loads(json.dumps(meta))


def restored(into: TrainState, tensors: Any, meta: Any) -> TrainState:
    """As a checkpoint is loaded: in place into what ``tensors`` names."""
    target = into.tensors()
    assert {k: v.keys() for k, v in target.items()} == {k: v.keys() for k, v in tensors.items()}
    for kind, values in tensors.items():
        for name, value in values.items():
            target[kind][name].copy_(value)
    into.adopt(target, meta)
    return into


def assert_same(one: TrainState, other: TrainState) -> None:
    torch.testing.assert_close(one.tensors(), other.tensors(), rtol=0, atol=0)
    assert one.to_save()[1] == other.to_save()[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_goes_on_as_if_nothing_had_happened(name: str) -> None:
    try:
        whole, parts = state_with(name), state_with(name)
    except UserError as error:
        pytest.skip(str(error))
    train(whole, 0, 7)
    train(parts, 0, 4)
    named = {k for k, v in parts._flat_optimizer().items() if isinstance(v, torch.Tensor)}
    assert parts.tensors()["optimizer"].keys() == named
    parts = restored(state_with(name), *saved(parts))
    train(parts, 4, 7)
    assert_same(parts, whole)


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("sgd", {"momentum": 0.9, "nesterov": True}),
        ("sgd", {"momentum": 0.9, "dampening": 0.5}),
        ("adamw", {"amsgrad": True}),
        ("rmsprop", {"momentum": 0.9, "centered": True}),
    ],
)
def test_arguments_that_add_state(name: str, kwargs: dict[str, Any]) -> None:
    whole, parts = (state_with(name, kwargs=kwargs) for _ in range(2))
    train(whole, 0, 5)
    train(parts, 0, 2)
    parts = restored(state_with(name, kwargs=kwargs), *saved(parts))
    train(parts, 2, 5)
    assert_same(parts, whole)


def test_how_it_updates_is_not_saved() -> None:
    """Of a checkpoint from a GPU, or of an earlier version, the kernel's name is left."""
    whole, parts = (state_with("adamw", kwargs={"fused": True}) for _ in range(2))
    train(parts, 0, 2)
    tensors, meta = saved(parts)
    assert not any("fused" in group for group in meta["optimizer"]["groups"])
    for group in meta["optimizer"]["groups"]:
        group["fused"] = True
    other = restored(state_with("adamw", kwargs={"foreach": True}), tensors, meta)
    assert {group["fused"] for group in other.optimizer.param_groups} == {None}
    train(other, 2, 4)
    train(whole, 0, 4)
    torch.testing.assert_close(other.tensors(), whole.tensors())


@pytest.mark.parametrize("name", ["adamw", "adopt", "madgrad", "sgd"])
def test_an_optimiser_that_has_not_stepped_stays_so(name: str) -> None:
    """All updates before were left out; a state made up for a save would count as a step."""
    whole, parts, fresh = (state_with(name) for _ in range(3))
    tensors, meta = saved(parts)
    first = restored(fresh, tensors, meta)
    for state in (whole, parts, first):
        train(state, 0, 3)
    assert_same(parts, whole)
    assert_same(first, whole)
    assert saved(parts)[0]["optimizer"].keys() == tensors["optimizer"].keys()


def test_averages_scaler_and_progress() -> None:
    whole, parts = state_with("adamw", ema=True), state_with("adamw", ema=True)
    train(whole, 0, 6)
    train(parts, 0, 3)
    parts.scaler.step_is_good(torch.tensor(torch.inf))
    whole.scaler.step_is_good(torch.tensor(torch.inf))
    parts.progress = Progress(3, 1, 24, 71, 9, 97.5, 2)
    other = restored(state_with("adamw", ema=True), *saved(parts))
    assert other.progress == parts.progress
    assert other.scaler.scale == parts.scaler.scale
    train(other, 3, 6)
    assert other.ema is not None and whole.ema is not None
    torch.testing.assert_close(other.ema.shadow, whole.ema.shadow, rtol=0, atol=0)


def test_names_are_those_of_the_model() -> None:
    state = state_with("adamw", ema=True)
    train(state, 0, 1)
    tensors = state.tensors()
    names = [n for n, p in state.model.named_parameters()]
    assert set(tensors["model"]) == set(state.model.state_dict())
    assert {f"state.{n}.exp_avg" for n in names} <= set(tensors["optimizer"])
    assert set(names) <= set(tensors["ema"])
    assert all(isinstance(v, torch.Tensor) for part in tensors.values() for v in part.values())
