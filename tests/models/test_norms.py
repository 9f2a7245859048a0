"""Fast BatchNorm and max-pooling: the numbers of torch's own."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn

from lockstep.models import norms
from lockstep.models.norms import FastBatchNorm, speed_up_norms
from tests.models.devices import DEVICES, distance, needs_gpu


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, too: where the operators have no kernels, but what these stand for."""
    monkeypatch.setattr(norms, "_trains_on_gpu", lambda layer, _: layer.training)


def images(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Channels with means far from 0, channels last."""
    random = torch.Generator().manual_seed(sum(shape))
    means = 20.0 * (torch.arange(shape[1]) % 5).view(1, -1, 1, 1) - 30
    x = torch.randn(shape, generator=random) + means
    return x.to(device, dtype, memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["alone", "relu"])
@pytest.mark.parametrize(
    "shape", [(2, 16, 5, 7), (5, 80, 1, 1), (4, 64, 33, 17), (1, 16, 6, 5)], ids=str
)
def test_batch_norm(
    everywhere: None, shape: tuple[int, ...], relu: bool, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    exact = nn.BatchNorm2d(shape[1], momentum=0.3).to(device)
    nn.init.normal_(exact.weight, 1.0)
    nn.init.normal_(exact.bias)
    fast = copy.deepcopy(exact)
    exact.double()
    speed_up_norms(both := nn.Sequential(fast, nn.ReLU() if relu else nn.Identity()))
    assert type(fast) is FastBatchNorm and type(both[1]) is nn.Identity  # not ReLU any more
    x = images(*shape, dtype=dtype, device=device)
    close = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    normed = F.batch_norm(x.double(), None, None, exact.weight, exact.bias, training=True)
    clear = normed.detach().abs() > 1e-3  # which way ReLU takes the others, rounding may decide
    results = []
    for network, inputs in (
        (nn.Sequential(exact, nn.ReLU() if relu else nn.Identity()), x.double()),
        (both, x),
    ):
        output = network(inputs)
        # Of both signs in every channel: their sum times a rounded mean is in all of fp32's results.
        flow = torch.arange(output.numel()).cos().to(dtype).view(shape).to(output).where(clear, 0)
        gradients = torch.autograd.grad(output, [x, *network.parameters()], flow)
        results.append([output, *gradients, *network.buffers()])
    assert results[1][0].dtype == dtype
    for found, wanted in zip(*reversed(results), strict=True):
        assert distance(found, wanted) < close
    both.eval(), exact.eval()
    expected = exact(x.double())
    assert distance(both(x), F.relu(expected) if relu else expected) < close


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 16, 8, 10), (1, 16, 7, 9), (2, 16, 1, 1), (3, 32, 2, 3), (2, 80, 33, 16)], ids=str
)
def test_max_pool(
    everywhere: None, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    """Scales of both signs: what is largest then is least before."""
    torch.manual_seed(0)
    exact = nn.Sequential(nn.BatchNorm2d(shape[1]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)).to(device)
    nn.init.normal_(exact[0].weight)
    nn.init.normal_(exact[0].bias)
    fast = copy.deepcopy(exact)
    exact.double()
    speed_up_norms(fast)
    assert [type(m) for m in fast] == [FastBatchNorm, nn.Identity, nn.Identity]
    x = images(*shape, dtype=dtype, device=device)
    close = {torch.float32: 1e-4, torch.bfloat16: 2e-2}[dtype]
    results = []
    for network, inputs in ((exact, x.double()), (fast, x)):
        output = network(inputs)
        flow = torch.arange(output.numel()).cos().to(dtype).view_as(output).to(output)
        gradients = torch.autograd.grad(output, [x, *network.parameters()], flow)
        results.append([output, *gradients, *network.buffers()])
    assert results[1][0].dtype == dtype
    for found, wanted in zip(*reversed(results), strict=True):
        assert distance(found, wanted) < close
    fast.eval(), exact.eval()
    assert distance(fast(x), exact(x.double())) < close


@pytest.mark.parametrize("far", [1e4, 100.0])
def test_a_value_far_off(everywhere: None, far: float) -> None:
    """The very first, or the first of each image."""
    x = images(16, 16, 28, 28, dtype=torch.float32, device="cpu").detach()
    x[: 1 if far == 1e4 else None, :, 0, 0] = far
    found, wanted = FastBatchNorm(16), nn.BatchNorm2d(16).double()
    found(x), wanted(x.double())
    torch.testing.assert_close(found.running_var.double(), wanted.running_var, rtol=1e-4, atol=0)


def test_what_is_left_to_torch(everywhere: None) -> None:
    norm = FastBatchNorm(16)
    with pytest.raises(ValueError, match="more than 1 value"):
        norm(torch.randn(1, 16, 1, 1))
    with pytest.raises(ValueError, match="4D"):
        norm(torch.randn(2, 16, 4))
    assert norm(torch.empty(0, 16, 4, 4)).shape == (0, 16, 4, 4)


def noted(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


class Tapped(nn.Sequential):
    """Of which somebody wants what BatchNorm gives."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        normed = self[0](input)
        return self[1](normed) + normed


SHARED = nn.BatchNorm2d(16)


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.BatchNorm2d(16), noted(nn.ReLU())),
        Tapped(nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Sequential(SHARED, nn.ReLU()), SHARED),
        nn.Sequential(SHARED, nn.ReLU(), SHARED, nn.Sigmoid()),
    ],
    ids=["a hook", "a forward of its own", "elsewhere, too", "twice"],
)
def test_relu_that_stays(network: nn.Module) -> None:
    fast = copy.deepcopy(network)
    speed_up_norms(fast)
    assert sum(isinstance(m, nn.ReLU) for m in fast.modules()) == 1
    x = images(2, 16, 4, 4, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(fast.eval()(x), network.eval()(x))


def test_pooling_that_stays() -> None:
    """What the norm gives is wanted elsewhere as it is."""
    shared = BatchNormAct2d(16)
    network = nn.Sequential(nn.Sequential(shared, nn.MaxPool2d(3, 2, 1)), shared)
    fast = copy.deepcopy(network)
    speed_up_norms(fast)
    assert type(fast[1]) is FastBatchNorm and type(fast[0][1]) is nn.MaxPool2d
    x = images(2, 16, 4, 4, dtype=torch.float32, device="cpu")
    torch.testing.assert_close(fast.eval()(x), network.eval()(x))


def test_max_pool_of_what_is_no_number(everywhere: None) -> None:
    """It is seen, and nothing else of it is in what follows."""
    exact = nn.Sequential(nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    fast = copy.deepcopy(exact)
    speed_up_norms(fast)
    x = images(2, 16, 8, 8, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        x[0, 3, 2, 2] = float("nan")
    assert torch.equal(fast(x).isnan(), exact(x).isnan())


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("relu", [False, True], ids=["alone", "relu"])
@pytest.mark.parametrize("shape", [(401408, 64), (12544, 2048), (3136, 257), (70, 8)], ids=str)
def test_kernels_are_what_they_stand_for(
    shape: tuple[int, int], relu: bool, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(0)
    rows, flow = (torch.randn(shape, generator=random).add(2).to(dtype) for _ in range(2))
    mean, scale, bias = torch.randn(3, shape[1], generator=random)
    found = [*norms.batch_moments(rows.cuda())]
    wanted = [*norms.batch_moments(rows)]
    inputs = (flow, rows, mean, scale, bias)
    found.append(norms.gradient_sums(*(i.cuda() for i in inputs), relu))
    wanted.append(norms.gradient_sums(*inputs, relu))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-2)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 64, 112, 112), (2, 80, 9, 7), (1, 16, 1, 1)], ids=str)
def test_pooling_kernels_are_what_they_stand_for(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(0)
    last = {"memory_format": torch.channels_last}
    x = torch.randn(shape, generator=random).to(dtype=dtype, **last)
    of_channels = torch.randn(5, shape[1], generator=random)
    wanted = norms.norm_max_pool(x, *of_channels[:3])
    found = norms.norm_max_pool(x.cuda(), *of_channels[:3].cuda())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.cpu(), b)
        assert a.is_contiguous(**last)
    flow = torch.randn(wanted[0].shape, generator=random).to(dtype=dtype, **last)
    inputs = (flow, wanted[1], x, *of_channels[[0, 1, 3, 4]])
    found_back = norms.norm_max_pool_backward(*(i.cuda() for i in inputs))
    torch.testing.assert_close(found_back.cpu(), norms.norm_max_pool_backward(*inputs))


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_that_lie_apart(everywhere: None, device: str) -> None:
    """Of a concatenation they are slices, of a sum one number for all."""
    x = images(3, 16, 4, 5, dtype=torch.float32, device=device)
    flow = torch.arange(x.numel() * 3, device=device).cos().view(3, 48, 4, 5)
    results = []
    for fast in (False, True):
        norm = nn.BatchNorm2d(16).to(device)
        if fast:
            speed_up_norms(nn.Sequential(norm))
        both = torch.cat([x, norm(x), x], 1)
        slices = torch.autograd.grad((both * flow).sum(), [x, *norm.parameters()])
        results.append([*slices, *torch.autograd.grad(norm(x).sum(), norm.parameters())])
    for found, wanted in zip(*reversed(results), strict=True):
        assert distance(found, wanted) < 1e-2


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("resnet18", {FastBatchNorm: 20, nn.MaxPool2d: 0, nn.ReLU: 8}),
        ("resnet26d", {FastBatchNorm: 31, nn.MaxPool2d: 0, nn.ReLU: 8}),
        ("densenet121", {FastBatchNorm: 121, nn.MaxPool2d: 0}),
        ("regnetx_002", {FastBatchNorm: 23}),
        ("efficientnet_b0", {FastBatchNorm: 12}),
        ("vit_tiny_patch16_224", {}),
    ],
)
def test_networks(name: str, kinds: dict[type, int]) -> None:
    """ReLU stays where something lies between it and BatchNorm, as a block's end."""
    network = timm.create_model(name)
    names = list(network.state_dict())
    speed_up_norms(network)
    assert list(network.state_dict()) == names
    found = Counter(type(m) for m in network.modules())
    assert {kind: found[kind] for kind in kinds} == kinds
    assert kinds or FastBatchNorm not in found


class Chain(nn.Module):
    """torch 2.11's compiler takes the layers of torch's own Sequential one by one."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: [n, c, h, w]."""
        output: torch.Tensor = self.layers(input)
        return output


@pytest.mark.parametrize("device", DEVICES)
def test_layers_compiled_alone(everywhere: None, device: str) -> None:
    """In 32 bits nothing is rounded at a layer's end: its result must not be taken for another's."""
    torch.manual_seed(0)
    for layers in ([nn.BatchNorm2d(16)], [nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]):
        plain = nn.Sequential(*layers).to(device)
        fast = copy.deepcopy(plain)
        speed_up_norms(fast)
        torch._dynamo.reset()
        fast[0].compile(backend="inductor" if device == "cuda" else "aot_eager")
        x = images(4, 16, 8, 8, dtype=torch.float32, device=device)
        gradients = []
        for network in (fast, plain):
            output = network(x)
            flow = torch.arange(output.numel(), device=device).cos().view_as(output)
            gradients.append(torch.autograd.grad(output, [x, *network.parameters()], flow))
        for found, wanted in zip(*gradients, strict=True):
            assert distance(found, wanted) < 1e-2


@pytest.mark.parametrize("device", DEVICES)
def test_compiled(everywhere: None, device: str) -> None:
    """And anew for a second size of batches, but not for each further one."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
    plain = Chain(*layers, nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(16)).to(device)
    fast = copy.deepcopy(plain)
    speed_up_norms(fast)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fast.compile(backend="inductor" if device == "cuda" else "aot_eager")  # C++ takes long
    for size in (4, 6, 8, 10):
        x = images(size, 3, 16, 16, dtype=torch.float32, device=device)
        results = []
        for network in (plain, fast):
            network.zero_grad()
            output = network(x)
            flow = torch.arange(output.numel(), device=device).cos().view_as(output)
            (output * flow).sum().backward()
            results.append([p.grad for p in network.parameters()] + list(network.buffers()))
        for a, b in zip(*results, strict=True):
            assert a is not None and b is not None
            assert distance(b, a) < 1e-2
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
