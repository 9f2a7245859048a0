"""Parameter groups, and optimisers by the names of torch and timm."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import timm.optim
import torch
from torch import nn

from lockstep.config.schema import Optimizer
from lockstep.errors import UserError
from lockstep.models.build import no_decay_names
from lockstep.optim.build import build_optimizer, parameter_groups


def config(name: str = "adamw", **changes: Any) -> Optimizer:
    values: dict[str, Any] = {
        "name": name,
        "lr": 0.01,
        "base_batch": None,
        "weight_decay": 0.05,
        "decay_bias_and_norm": False,
        "clip_grad_norm": None,
        "kwargs": {},
    }
    return Optimizer(**(values | changes))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)
    )


def made(name: str, **changes: Any) -> torch.optim.Optimizer:
    return build_optimizer(network(), config(name, **changes), no_decay=set(), fused=False)


# --- groups -----------------------------------------------------------------------------------


def names_by_decay(model: nn.Module, **changes: Any) -> dict[float, set[str]]:
    names = {id(p): n for n, p in model.named_parameters()}
    groups = parameter_groups(model, config(**changes), no_decay_names(model))
    return {g["weight_decay"]: {names[id(p)] for p in g["params"]} for g in groups}


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "resnet18", "swin_tiny_patch4_window7_224"]
)
def test_no_decay_on_biases_norms_and_what_the_model_excludes(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    groups = names_by_decay(model)
    assert set(groups) == {0.05, 0.0}
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert groups[0.05] | groups[0.0] == set(shapes)
    assert not groups[0.05] & groups[0.0]
    for n in groups[0.05]:
        assert len(shapes[n]) > 1 and not n.endswith("bias"), n
    matrices = {n for n, shape in shapes.items() if len(shape) > 1}
    assert groups[0.0] & matrices == no_decay_names(model) & matrices


def test_position_embeddings_have_no_decay() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224")
    assert {"pos_embed", "cls_token"} <= names_by_decay(model)[0.0]


def test_a_bias_of_two_dimensions_has_no_decay() -> None:
    model = nn.Linear(2, 2)
    model.bias = nn.Parameter(torch.zeros(1, 2))
    assert names_by_decay(model) == {0.05: {"weight"}, 0.0: {"bias"}}


def test_decay_for_all() -> None:
    model = network()
    assert names_by_decay(model, decay_bias_and_norm=True) == {
        0.05: {n for n, _ in model.named_parameters()}
    }


def test_frozen_parameters_are_left_out() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    named = set().union(*names_by_decay(model).values())
    assert named == {n for n, _ in model.named_parameters()} - {"0.weight"}


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, cls",
    [
        ("sgd", torch.optim.SGD),
        ("SGD", torch.optim.SGD),
        ("AdamW", torch.optim.AdamW),
        ("radam", torch.optim.RAdam),
        ("asgd", torch.optim.ASGD),
        ("lamb", timm.optim.Lamb),
        ("Lion", timm.optim.Lion),
        ("muon", timm.optim.Muon),
    ],
)
def test_names(name: str, cls: type) -> None:
    optimizer = made(name)
    assert type(optimizer) is cls
    assert {g["lr"] for g in optimizer.param_groups} == {0.01}
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.05, 0.0]


def test_arguments_arrive() -> None:
    optimizer = made("adamw", kwargs={"betas": [0.8, 0.9], "eps": 1e-6})
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-6


@pytest.mark.parametrize("name, fused", [("adamw", True), ("adam", True), ("sgd", None)])
def test_fused_where_sharded_tensors_have_it(name: str, fused: bool | None) -> None:
    optimizer = build_optimizer(network(), config(name), no_decay=set(), fused=True)
    assert optimizer.defaults["fused"] is fused


@pytest.mark.parametrize("another", ["foreach", "differentiable"])
def test_not_fused_where_another_way_is_asked_for(another: str) -> None:
    cfg = config("adamw", kwargs={another: True})
    optimizer = build_optimizer(network(), cfg, no_decay=set(), fused=True)
    assert not optimizer.defaults["fused"] and optimizer.defaults[another]


@pytest.mark.parametrize(
    "name, changes, message",
    [
        pytest.param("adamm", {}, "did you mean .*adam", id="similar"),
        pytest.param("qqqq", {}, "one of .*adamw", id="nothing similar"),
        pytest.param("sgd", {"kwargs": {"nesterov": True}}, "Nesterov", id="value"),
        pytest.param("lbfgs", {}, "closure", id="closure"),
        pytest.param("SparseAdam", {}, "sparse", id="sparse"),
        pytest.param("adahessian", {}, "second derivatives", id="second order"),
        pytest.param("kron", {}, "checkpoints", id="state"),
        pytest.param("optimizer", {}, "neither torch nor timm", id="the base class"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"optimizer.name = {name}.*{message}"):
        made(name, **changes)


@pytest.mark.parametrize("name", ["fusedlamb", "bnbadam"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine may have what these need")
def test_a_machine_without_what_an_optimizer_needs(name: str) -> None:
    with pytest.raises(UserError, match=name):
        made(name)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_an_argument_that_does_not_exist_is_named(name: str) -> None:
    message = rf"optimizer\.kwargs\.foo = 1: {name} has no such argument"
    with pytest.raises(UserError, match=message):
        made(name, kwargs={"foo": 1})
