"""The fast attention: torch's numbers, the bias's gradient without another pass."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention
from torch import nn

from lockstep.models import attention as ours
from lockstep.models import vit
from lockstep.models.attention import ShortAttention, short_attention, speed_up_attention
from lockstep.models.vit import FastAttention, speed_up_blocks
from tests.models.test_join import Counting

needs_gpu = pytest.mark.skipif(not ours._is_on_our_gpu(), reason="needs a GPU of our kernels'")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]


is_on_our_gpu = ours._is_on_our_gpu


@pytest.fixture(autouse=True)
def on_our_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_is_on_our_gpu", lambda: True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "tokens", [1, 32, 33, 64, 65, 128, 129, 150, 192, 193, 197, 208, 209, 224, 225, 256]
)
@pytest.mark.parametrize(("n", "heads"), [(1, 1), (2, 3)])
def test_gradients(n: int, heads: int, tokens: int, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    bias = torch.randn(3 * heads * 64, device=device, requires_grad=True)
    x = 1.5 * torch.randn(n, tokens, 3 * heads * 64, device=device)
    x = (x + bias).detach().to(dtype).requires_grad_()
    flow = torch.randn(n, tokens, heads * 64, device=device).to(dtype)

    exact = x.detach().double().requires_grad_()
    q, k, v = exact.view(n, tokens, 3, heads, 64).permute(2, 0, 3, 1, 4).unbind(0)
    wanted = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    (slope,) = torch.autograd.grad(wanted, exact, flow.double())

    found = short_attention(x, bias, heads)
    assert found.dtype == dtype
    close = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), wanted, rtol=close, atol=close)
    of_x, of_bias = torch.autograd.grad(found, [x, bias], flow)
    assert of_x.dtype == dtype and of_bias.dtype == bias.dtype
    # Two thirds are zero where there is one token: differences of numbers like those of the third.
    for a, b in zip(of_x.double().chunk(3, -1), slope.chunk(3, -1), strict=True):
        size = slope if tokens == 1 else b
        assert float((a - b).norm()) < close * (float(size.norm()) + 1)
    total = slope.sum((0, 1))
    assert float((of_bias - total).norm()) < close * float(slope.norm() + 1)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("tokens", [197, 256])
def test_the_kernels_are_what_they_stand_for(tokens: int) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(64, tokens, 3, 12, 64).bfloat16()
    flow = torch.randn(64, tokens, 12, 64).bfloat16()
    out, lse = ours.attention(qkv)
    found, found_lse = ours.attention(qkv.cuda())
    torch.testing.assert_close(found.cpu(), out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(
        found_lse.cpu()[..., :tokens], lse[..., :tokens], rtol=1e-4, atol=1e-3
    )
    arguments = (flow, qkv, out, lse)
    wanted = ours.attention_backward(*arguments)
    results = [ours.attention_backward(*(t.cuda() for t in arguments)) for _ in range(2)]
    for a, b, again in zip(results[0], wanted, results[1], strict=True):
        assert torch.equal(a, again)
        assert float((a.cpu() - b).float().norm() / b.float().norm()) < 2e-2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [33, 197])
def test_keys_far_from_all_queries(tokens: int, device: str) -> None:
    """What is computed past the last key, where a weight would be 2^180, adds nothing."""
    torch.manual_seed(0)
    qkv = torch.randn(2, tokens, 3, 2, 64)
    qkv[:, :, 0] -= 4
    qkv[:, :, 1] += 4
    qkv = qkv.bfloat16().to(device)
    flow = torch.randn(2, tokens, 2, 64).bfloat16().to(device)
    out, lse = ours.attention(qkv)
    assert float(lse[..., :tokens].max()) < -128
    exact = qkv.double().requires_grad_()
    q, k, v = exact.transpose(1, 3).unbind(2)
    wanted = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    (slope,) = torch.autograd.grad(wanted, exact, flow.double())
    torch.testing.assert_close(out.double(), wanted.detach(), rtol=3e-2, atol=3e-2)
    found, _ = ours.attention_backward(flow, qkv, out, lse)
    assert float((found - slope).norm()) < 3e-2 * float(slope.norm())


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_past_the_last_key_does_not_overflow(device: str) -> None:
    """There a weight is 1, and its gradient as large as all together: more than float16 has."""
    torch.manual_seed(0)
    qkv = torch.randn(1, 33, 3, 1, 64) / 50
    qkv += torch.tensor([-1.5, 1.5, 1.0])[:, None, None]
    flow = 1200 + torch.randn(1, 33, 1, 64)
    qkv, flow = qkv.half().to(device), flow.half().to(device)
    out, lse = ours.attention(qkv)
    assert float((flow.float() * out.float()).sum(-1).min()) > torch.finfo(torch.float16).max
    found, _ = ours.attention_backward(flow, qkv, out, lse)
    assert found.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_a_gradient_that_is_not_finite(value: float, device: str) -> None:
    """It is not hidden, and stays in its head."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 197, 3, 2, 64).bfloat16().to(device)
    flow = torch.randn(2, 197, 2, 64).bfloat16().to(device)
    out, lse = ours.attention(qkv)
    clean = ours.attention_backward(flow, qkv, out, lse)
    flow[1, 150, 0, 7] = value
    flow_, sums = ours.attention_backward(flow, qkv, out, lse)
    assert not flow_[1, 150, 0, 0].isfinite().any() and not flow_[1, :, 1:, 0].isfinite().all()
    assert not sums[1, 0, 0].isfinite().any()
    assert torch.equal(flow_[:, :, :, 1], clean[0][:, :, :, 1])
    assert torch.equal(flow_[0], clean[0][0]) and torch.equal(sums[0], clean[1][0])


def test_a_block_is_read_before_the_next_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the machine's code, of which the compiler sees only when products begin."""
    compiler = pytest.importorskip("triton.compiler.compiler")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from lockstep.models.attention_kernels import SWIZZLED
    from lockstep.models.attention_kernels import attention_backward_kernel as kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    blocks = {rows: f"tensordesc<bf16[1,{rows},64],{SWIZZLED!r}>" for rows in (32, 64)}
    types = [32, 32, 64, 32, "*fp32", 32, 64, "*fp32", "fp32", "fp32", "i32", "i32"]
    types = [blocks.get(kind, kind) for kind in types] + ["constexpr"] * 2
    signature = dict(zip(kernel.arg_names, types, strict=True))
    source = GluonASTSource(kernel, signature, constexprs={(12,): 256, (13,): 7})
    target = GPUTarget("cuda", 90, 32)
    code = compiler.compile(source, target=target, options={"num_warps": 4, "maxnreg": 168})
    assert 3 * (code.metadata.shared + 1024) <= 228 * 1024  # three programs share a processor
    after = code.asm["ptx"].split("wgmma.wait_group.sync.aligned 0;")[1:]
    copies = [part.split("cp.async.bulk.tensor.3d.shared", 1) for part in after]
    assert len(after) > 1 and any(len(copy) > 1 for copy in copies)
    assert all("bar.sync" in copy[0] for copy in copies if len(copy) > 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("token", [3, 150, 196], ids="token {}".format)
@pytest.mark.parametrize("part", [0, 1, 2], ids=["query", "key", "value"].__getitem__)
def test_nan_goes_where_it_should(part: int, token: int, device: str) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(2, 197, 3, 2, 64).bfloat16()
    qkv[1, token, part, 1, 5] = torch.nan
    wanted = torch.zeros(2, 197, 2, 64, dtype=torch.bool)
    wanted[1, token if part == 0 else slice(None), 1, 5 if part == 2 else slice(None)] = True
    out, lse = (t.cpu().isnan() for t in ours.attention(qkv.to(device)))
    assert torch.equal(out, wanted)
    assert torch.equal(lse[..., :197].mT, wanted.all(-1))


def test_pieces_of_keys() -> None:
    for tokens in range(1, ours._MOST_TOKENS + 1):
        pieces = ours._pieces(tokens)
        assert list(pieces) == sorted(pieces, reverse=True)
        assert all(piece.bit_count() <= 1 for piece in pieces)
        *full, last = (piece for piece in pieces if piece)
        assert sum(full) < tokens <= sum(full) + last
        assert sum(pieces) - tokens < (64 if tokens <= 192 else 16 if tokens <= 224 else 32)


def layer(dim: int = 128, **kwargs: Any) -> Attention:
    return Attention(
        dim, **{"num_heads": 2, "qkv_bias": True, "norm_layer": nn.LayerNorm, **kwargs}
    )


@pytest.mark.parametrize(
    ("before", "becomes"),
    [
        pytest.param(layer(), ShortAttention, id="usual"),
        pytest.param(layer(proj_drop=0.1, scale_norm=True), ShortAttention, id="norm after"),
        pytest.param(layer(64), FastAttention, id="narrow heads"),
        pytest.param(layer(attn_drop=0.1), FastAttention, id="dropout of weights"),
        pytest.param(layer(qkv_bias=False), Attention, id="no bias"),
    ],
)
def test_what_is_replaced(before: Attention, becomes: type[Attention]) -> None:
    names = list(before.state_dict())
    model = nn.Sequential(before)
    speed_up_blocks(model)
    speed_up_attention(model)
    assert type(before) is becomes
    assert list(before.state_dict()) == names


@pytest.mark.parametrize(
    ("capability", "hip", "becomes"),
    [
        ((8, 0), None, FastAttention),
        ((9, 0), None, ShortAttention),
        ((10, 0), None, FastAttention),
        ((9, 4), "7.0", FastAttention),
    ],
    ids=str,
)
def test_which_gpus(
    capability: tuple[int, int],
    hip: str | None,
    becomes: type[Attention],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(ours, "_is_on_our_gpu", is_on_our_gpu)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    model = nn.Sequential(layer())
    speed_up_blocks(model)
    speed_up_attention(model)
    assert type(model[0]) is becomes


@pytest.mark.parametrize("compiled", [False, True], ids=["as it is", "compiled"])
@pytest.mark.parametrize("device", DEVICES)
def test_networks(device: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gradients to 16 bits; torch's way with many tokens."""
    used: list[int] = []
    monkeypatch.setattr(vit, "trains_in_16_bits", lambda layer, _: layer.training)
    torch.manual_seed(0)
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, depth=2, embed_dim=128, num_heads=2,
        num_classes=5, dynamic_img_size=True,
    ).to(device)  # fmt: skip
    for name, parameter in plain.named_parameters():
        if name.endswith("qkv.bias"):
            nn.init.normal_(parameter)
    fast = copy.deepcopy(plain)
    speed_up_blocks(fast)
    speed_up_attention(fast)
    counting = Counting()
    if compiled:
        counting.compile(fast, device)
    else:
        real = ours.attention

        def attention(qkv: torch.Tensor) -> Any:
            used.append(qkv.shape[1])
            return real(qkv)

        monkeypatch.setattr(ours, "attention", attention)
    for count, size in ((4, 16), (6, 16), (4, 64))[: 2 if compiled else 3]:
        images = torch.randn(count, 3, size, size, device=device)
        results = []
        for network in (plain, fast):
            network.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                output = network(images).float()
            output.square().sum().backward()
            results.append([p.grad for p in network.parameters()])
        for a, b in zip(*results, strict=True):
            assert a is not None and b is not None
            assert float((b - a).norm()) < 0.05 * float(a.norm()) + 1e-3
    if compiled:
        assert counting.attention in (2, 4)  # a graph of 4 images, perhaps another of any number
    else:
        assert used == [17, 17, 17, 17]
    with torch.inference_mode():
        torch.testing.assert_close(fast.eval()(images), plain.eval()(images))
