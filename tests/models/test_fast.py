from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

from lockstep.models import attention
from lockstep.models.fast import PatchConv, StemConv, compile_in_place, speed_up
from lockstep.models.join import JoinGradients
from lockstep.models.mlp import FastMlp
from lockstep.models.norms import FastBatchNorm
from lockstep.models.vit import FastBlock


@pytest.mark.parametrize("size", [(16, 24), (17, 27), (31, 16)], ids=str)
@pytest.mark.parametrize(
    ("layer", "replaced_by"),
    [
        pytest.param(nn.Conv2d(3, 5, 7, 2, 3, bias=False), StemConv, id="7x7"),
        pytest.param(nn.Conv2d(3, 5, 3, 2, 1), StemConv, id="3x3"),
        pytest.param(nn.Conv2d(1, 5, 5, 2, 2), StemConv, id="5x5, grey"),
        pytest.param(nn.Conv2d(3, 5, 4, 4), PatchConv, id="patches"),
        pytest.param(nn.Conv2d(3, 5, (2, 4), (2, 4), bias=False), PatchConv, id="oblong patches"),
        pytest.param(nn.Conv2d(3, 5, 7, 2, 2), nn.Conv2d, id="off centre"),
        pytest.param(nn.Conv2d(3, 5, (3, 7), 2, (1, 3)), nn.Conv2d, id="oblong"),
        pytest.param(nn.Conv2d(3, 5, 3, 1, 1), nn.Conv2d, id="stride 1"),
        pytest.param(nn.Conv2d(3, 3, 3, 2, 1, groups=3), nn.Conv2d, id="depthwise"),
        pytest.param(nn.Conv2d(3, 5, 3, 2, 1, padding_mode="reflect"), nn.Conv2d, id="reflect"),
    ],
)
def test_convolutions(layer: nn.Conv2d, replaced_by: type, size: tuple[int, int]) -> None:
    images = torch.randn(2, layer.in_channels, *size, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]
    layer = layer.double()
    layer.__class__ = nn.Conv2d
    expected = layer(images)
    wanted = torch.autograd.grad(expected.square().sum(), [images, *layer.parameters()])
    speed_up(nn.Sequential(layer))
    assert type(layer) is replaced_by
    assert [name for name, _ in layer.named_parameters()] == names
    output = layer(images)
    torch.testing.assert_close(output, expected)
    found = torch.autograd.grad(output.square().sum(), [images, *layer.parameters()])
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_networks() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=5)
    resnet = timm.create_model("resnet18", num_classes=5)
    names = list(vit.state_dict()), list(resnet.state_dict())
    images = torch.randn(2, 3, 32, 32)
    expected = vit(images), resnet.eval()(images)
    speed_up(vit)
    speed_up(resnet)
    assert isinstance(vit.patch_embed.proj, PatchConv) and isinstance(resnet.conv1, StemConv)
    assert (list(vit.state_dict()), list(resnet.state_dict())) == names
    torch.testing.assert_close((vit(images), resnet(images)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norms", [False, True])
def test_kernels_of_ours(norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that have them, and the compiler's pass that joins them."""
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **kwargs: compiled.append(kwargs))
    monkeypatch.setattr(attention, "_is_on_our_gpu", lambda: True)
    model = nn.ModuleList([
        timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1),
        timm.create_model("resnet18"),
    ])  # fmt: skip
    for network in model:
        compile_in_place(network, "default", by_block=False, ours=True, norms=norms)
    found = {type(layer) for layer in model.modules()}
    assert found >= {FastMlp, FastBlock, attention.ShortAttention}
    assert (FastBatchNorm in found) is norms
    passes = [kwargs["options"]["post_grad_custom_pre_pass"] for kwargs in compiled]
    assert len(passes) == 2 and all(isinstance(each, JoinGradients) for each in passes)


@pytest.mark.parametrize(
    ("name", "kwargs", "by_block", "parts"),
    [
        pytest.param("vit_tiny_patch16_224", {"depth": 3}, False, [""], id="as a whole"),
        pytest.param(
            *("vit_tiny_patch16_224", {"depth": 2}, True),
            ["blocks.0", "blocks.1", "patch_embed"],
            id="as told",
        ),
        pytest.param(
            *("vit_tiny_patch16_224", {"depth": 17}, False),
            [*(f"blocks.{i}" for i in range(17)), "patch_embed"],
            id="deep",
        ),
        pytest.param("resnet152", {}, False, [""], id="deep, of many shapes"),
        pytest.param(
            *("resnet18", {}, True),
            [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)],
            id="a stem of single layers",
        ),
    ],
)
def test_what_is_compiled(
    name: str, kwargs: dict[str, int], by_block: bool, parts: list[str]
) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **kwargs)
    compile_in_place(model, "default", by_block=by_block, ours=False, norms=False)
    compiled = [n for n, m in model.named_modules() if m._compiled_call_impl is not None]
    assert sorted(compiled) == sorted(parts)
