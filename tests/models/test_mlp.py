"""The fast MLP: GELU's numbers to within what 16 bits can tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import nn

from lockstep.models import mlp
from lockstep.models.mlp import FastMlp, bias_gelu, gelu, gelu_backward, speed_up_mlps
from tests.models.devices import DEVICES, needs_gpu


def test_gelu_to_more_than_16_bits() -> None:
    x = torch.linspace(-12, 12, 100_001, dtype=torch.float64, requires_grad=True)
    wanted = F.gelu(x)
    (slope,) = torch.autograd.grad(wanted.sum(), x)
    rows = x.detach().float().view(1, -1)
    found = bias_gelu(rows, torch.zeros(rows.shape[1]))
    assert float((found[0] - wanted).abs().max()) < 5e-5
    flow, _ = gelu_backward(torch.ones_like(rows), rows, torch.zeros(rows.shape[1]))
    assert float((flow[0] - slope).abs().max()) < 5e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 24), (3, 197, 130), (1, 8), (4, 7, 7, 65)], ids=str)
def test_gradients(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = (2 * torch.randn(shape)).to(device, dtype).requires_grad_()
    bias = torch.randn(shape[-1], device=device, requires_grad=True)
    flow = torch.randn(shape, device=device).to(dtype)
    wanted = F.gelu(x.double() + bias)
    gradients = torch.autograd.grad(wanted, [x, bias], flow.double())
    found = bias_gelu(x, bias)
    assert found.dtype == dtype
    close = max(1e-4, 4 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found.double(), wanted, rtol=close, atol=1e-4)
    for a, b in zip(torch.autograd.grad(found, [x, bias], flow), gradients, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).double().norm() / b.double().norm()) < close


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_is_what_it_stands_for() -> None:
    x, flow = torch.randn(2, 25216, 3072, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-1, 1, 3072)
    found = gelu_backward(flow.cuda(), x.cuda(), bias.cuda())
    for a, b in zip(found, gelu_backward(flow, x, bias), strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-3)
    assert len(found[1]) == mlp._BACKWARD.parts(3072)
    for rows, channels in ((25216, 3072), (7, 3072), (3, 80), (1, 1040)):
        part, offset = x[:rows, :channels].contiguous(), bias[:channels]
        output = gelu(part.cuda(), offset.cuda())
        torch.testing.assert_close(output.cpu(), gelu(part, offset), rtol=1e-4, atol=1e-4)


class Odd(Mlp):
    """A class of somebody else's."""


@pytest.mark.parametrize(
    ("layer", "replaced"),
    [
        pytest.param(Mlp(8, 16), True, id="usual"),
        pytest.param(Mlp(8, 16, drop=0.1, norm_layer=nn.LayerNorm), True, id="dropout, norm"),
        pytest.param(Mlp(8, 16, act_layer=nn.ReLU), False, id="relu"),
        pytest.param(Mlp(8, 16, act_layer=lambda: nn.GELU("tanh")), False, id="other GELU"),
        pytest.param(Mlp(8, 16, bias=False), False, id="no bias"),
        pytest.param(Mlp(8, 16, use_conv=True), False, id="convolution"),
        pytest.param(Odd(8, 16), False, id="other class"),
    ],
)
def test_what_is_replaced(layer: Mlp, replaced: bool) -> None:
    before = type(layer)
    names = list(layer.state_dict())
    speed_up_mlps(nn.Sequential(layer))
    assert type(layer) is (FastMlp if replaced else before)
    assert list(layer.state_dict()) == names


@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("device", DEVICES)
def test_networks(
    device: str, compiled: bool, monkeypatch: pytest.MonkeyPatch, request: Any
) -> None:
    """In training with autocast alone; the same gradients to 16 bits."""
    used: list[torch.dtype] = []
    monkeypatch.setattr(mlp, "trains_in_16_bits", lambda layer, _: layer.training)
    torch.manual_seed(0)
    kwargs = {"img_size": 16, "depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}
    plain = timm.create_model("vit_tiny_patch16_224", patch_size=4, **kwargs).to(device)
    fast = copy.deepcopy(plain)
    speed_up_mlps(fast)
    if compiled:
        fast.compile(backend="inductor" if device == "cuda" else "aot_eager")  # C++ takes long
    else:
        real = mlp.bias_gelu
        monkeypatch.setattr(mlp, "bias_gelu", lambda x, b: (used.append(x.dtype), real(x, b))[1])
    images = torch.randn(4, 3, 16, 16, device=device)
    results = []
    for network in (plain, fast):
        with torch.autocast(device, torch.bfloat16):
            output = network(images).float()
        output.square().sum().backward()
        results.append([p.grad for p in network.parameters()])
    assert used == ([] if compiled else [torch.bfloat16] * 2)
    for a, b in zip(*results, strict=True):
        assert a is not None and b is not None
        assert float((b - a).norm()) < 0.05 * float(a.norm()) + 1e-3
    with torch.inference_mode():
        torch.testing.assert_close(fast.eval()(images), plain.eval()(images))


def test_not_for_the_cpu_nor_for_32_bits() -> None:
    layer = Mlp(4, 8)
    assert not mlp.trains_in_16_bits(layer, torch.zeros(1, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert not mlp.trains_in_16_bits(layer, torch.zeros(1, 4))
