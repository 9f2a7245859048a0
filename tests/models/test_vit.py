"""A Vision Transformer's fast block: the numbers of timm's to within 16 bits."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention, LayerNorm, Mlp
from timm.models.vision_transformer import Block
from torch import nn

from lockstep.config.schema import Precision
from lockstep.models import vit
from lockstep.models.vit import FastAttention, FastBlock, join_heads, norm_backward
from lockstep.strategy.precision import lower_residuals
from tests.models.devices import DEVICES, needs_gpu
from tests.models.devices import distance as far

# Gradients of biases are small here.
distance = partial(far, least=0.1)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too: where the operators have no kernels, but what these stand for."""
    monkeypatch.setattr(vit, "trains_in_16_bits", lambda layer, _: layer.training)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 5, 48), (1, 16), (3, 197, 192), (2, 3, 2, 1040)], ids=str)
def test_residual_norm(shape: tuple[int, ...], stream: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape) + 3).to(device, stream).requires_grad_()
    norm = LayerNorm(shape[-1]).to(device)
    nn.init.normal_(norm.weight, 1.0), nn.init.normal_(norm.bias)
    inputs = [x, norm.weight, norm.bias]
    flow, passed = torch.randn(2, *shape, device=device).to(torch.bfloat16)
    wanted = F.layer_norm(
        x.double(), shape[-1:], norm.weight.double(), norm.bias.double(), norm.eps
    )
    total = (wanted * flow).sum() + (x.double() * passed).sum()
    with torch.autocast(device, torch.bfloat16):
        same, found = vit.residual_norm(x, norm)
    assert torch.equal(same, x) and same.dtype == stream and found.dtype == torch.bfloat16
    assert distance(found, wanted) < 8e-3
    gradients = torch.autograd.grad([same, found], inputs, [passed.to(stream), flow])
    for a, b in zip(gradients, torch.autograd.grad(total, inputs), strict=True):
        assert a.dtype == b.dtype
        assert distance(a, b) < (8e-3 if a.dtype == torch.bfloat16 else 1e-4)


def heads(n: int, count: int, tokens: int, width: int) -> list[torch.Tensor]:
    """As attention's gradients may lie: head by head, token by token, within another tensor, apart."""
    plain = torch.randn(3, n, count, tokens, width, generator=torch.Generator().manual_seed(0))
    by_token = plain[1].transpose(1, 2).contiguous().transpose(1, 2)
    apart = plain[2].transpose(2, 3).contiguous().transpose(2, 3)
    return [plain[0], by_token, torch.cat([plain[2], plain[0]], 3)[..., :width], apart]


@pytest.mark.parametrize("shape", [(2, 4, 5, 16), (1, 1, 1, 64), (3, 3, 50, 64)], ids=str)
def test_heads(shape: tuple[int, ...]) -> None:
    n, count, tokens, width = shape
    joint = torch.randn(n, tokens, 3 * count * width, requires_grad=True)
    bias = torch.zeros(3 * count * width, requires_grad=True)
    wanted = (joint + bias).view(n, tokens, 3, count, width).permute(2, 0, 3, 1, 4)
    found = vit._Heads.apply(joint, bias, count)
    assert torch.equal(torch.stack(found), wanted)
    for flows in (heads(*shape)[:3], heads(*shape)[1:]):
        results = [
            torch.autograd.grad(outputs, [joint, bias], flows, retain_graph=True)
            for outputs in (found, wanted.unbind())
        ]
        assert torch.equal(results[0][0], results[1][0])
        torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernels_are_what_they_stand_for(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    for m, c in ((50432, 768), (70, 16), (3152, 192), (1000, 1280), (257, 4096)):
        residual, x = torch.randn(2, m, c, generator=random).to(dtype)
        flow = torch.randn(m, c, generator=random).bfloat16()
        inputs = [residual, flow, x, *torch.rand(2, m, generator=random)]
        inputs += [torch.randn(c, generator=random)]
        for images in (1, m // (5 if m % 5 == 0 else 1), None):
            kept = None if images is None else torch.rand(images, 1, 1, generator=random).to(dtype)
            found = norm_backward(
                *(i.cuda() for i in inputs), kept if kept is None else kept.cuda()
            )
            for a, b in zip(found, norm_backward(*inputs, kept), strict=True):
                close = 1e-2 if a.dtype == torch.bfloat16 else 1e-4
                torch.testing.assert_close(a.cpu(), b, rtol=close, atol=1e-3)
    for shape in ((64, 12, 197, 64), (3, 2, 5, 32), (1, 4, 1, 16)):
        three = [t.to(dtype) for t in heads(*shape)]
        for flows in (three[:3], three[1:]):
            out, sums = join_heads(*(t.cuda() for t in flows))
            wanted, parts = join_heads(*flows)
            assert torch.equal(out.cpu(), wanted)
            torch.testing.assert_close(sums.cpu(), parts, rtol=1e-4, atol=1e-3)


class OddBlock(Block):
    """A class of somebody else's."""


class OddMlp(Mlp):
    """And another."""


@pytest.mark.parametrize(
    ("kind", "options", "block", "attention"),
    [
        pytest.param(Block, {}, FastBlock, FastAttention, id="usual"),
        pytest.param(Block, {"init_values": 0.1}, FastBlock, FastAttention, id="layer scale"),
        pytest.param(Block, {"norm_layer": nn.LayerNorm}, FastBlock, FastAttention, id="torch's"),
        pytest.param(Block, {"qkv_bias": False}, FastBlock, Attention, id="no bias"),
        pytest.param(Block, {"qk_norm": True}, FastBlock, Attention, id="norm of q and k"),
        pytest.param(Block, {"num_heads": 8}, FastBlock, Attention, id="narrow heads"),
        pytest.param(Block, {"norm_layer": nn.RMSNorm}, Block, FastAttention, id="other norm"),
        pytest.param(
            *(Block, {"norm_layer": partial(LayerNorm, affine=False)}, Block, FastAttention),
            id="norm without weights",
        ),
        pytest.param(Block, {"mlp_layer": OddMlp}, Block, FastAttention, id="other MLP"),
        pytest.param(OddBlock, {}, OddBlock, FastAttention, id="other class"),
    ],
)
def test_what_is_replaced(
    kind: type[Block], options: dict[str, Any], block: type, attention: type
) -> None:
    layer = kind(64, **({"num_heads": 2, "qkv_bias": True} | options))
    names = list(layer.state_dict())
    vit.speed_up_blocks(nn.Sequential(layer))
    assert type(layer) is block and type(layer.attn) is attention
    assert list(layer.state_dict()) == names


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("residual", "scale", "compiled"),
    [
        pytest.param("low", None, False, id="low"),
        pytest.param("fp32", None, False, id="fp32"),
        pytest.param("low", 0.1, False, id="low, layer scale"),
        pytest.param("low", None, True, id="low, compiled"),
        pytest.param("fp32", 0.1, True, id="fp32, layer scale, compiled"),
    ],
)
def test_networks(
    everywhere: None, residual: str, scale: float | None, compiled: bool, device: str
) -> None:
    """Gradients as near to those of 32 bits as timm's are; no graph for each size of batches."""
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "num_heads": 2}
    kwargs |= {"depth": 2, "num_classes": 5, "init_values": scale}
    exact = timm.create_model("vit_tiny_patch16_224", **kwargs).to(device)
    plain, fast = copy.deepcopy(exact), copy.deepcopy(exact)
    if residual == "low":
        for network in (plain, fast):
            lower_residuals(network, Precision.model_construct(name="bf16", residual="low"))
    vit.speed_up_blocks(fast)
    assert all(type(b) is FastBlock for b in fast.blocks)
    if compiled:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fast.compile(backend="inductor" if device == "cuda" else "aot_eager")  # C++ takes long
    for size in (4, 6, 7)[: 3 if compiled else 1]:
        images = torch.randn(size, 3, 16, 16, device=device)
        results = []
        for network in (exact, plain, fast):
            network.zero_grad()
            with torch.autocast(device, torch.bfloat16, enabled=network is not exact):
                output = network(images).float()
            output.square().sum().backward()
            results.append([p.grad for p in network.parameters()])
        for wanted, usual, found in zip(*results, strict=True):
            assert distance(found, wanted) < 2 * distance(usual, wanted) + 5e-3
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
        assert not torch._dynamo.utils.counters["graph_break"]


def test_what_is_left_to_timm(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, evaluation, and layers with hooks, which have to be called."""
    torch.manual_seed(0)
    plain = Block(64, 2, qkv_bias=True)
    fast = copy.deepcopy(plain)
    vit.speed_up_blocks(nn.Sequential(fast))
    ours: list[str] = []
    for name in ("residual_norm", "_Heads"):
        monkeypatch.setattr(vit, name, lambda *_, name=name: ours.append(name) or 1 / 0)
    x, mask = torch.randn(2, 5, 64), torch.randn(5, 5)
    assert torch.equal(fast(x, attn_mask=mask), plain(x, attn_mask=mask))
    assert torch.equal(fast(x, mask), plain(x, mask))
    called: list[int] = []
    fast.norm2.register_forward_hook(lambda *_: called.append(2))
    fast.attn.qkv.register_forward_pre_hook(lambda *_: called.append(1))
    assert torch.equal(fast(x), plain(x)) and called == [1, 2]
    assert torch.equal(fast.eval()(x), plain.eval()(x)) and not ours
