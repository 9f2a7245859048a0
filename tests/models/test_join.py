"""The pass over the compiler's graph: it is found where it should be, and changes no number."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from lockstep.config.schema import Precision
from lockstep.models import vit
from lockstep.models.join import JoinGradients, joined_gradient
from lockstep.models.norms import speed_up_norms, sums_of_gradient
from lockstep.models.stochastic import seed_by_sample
from lockstep.strategy.precision import lower_residuals
from tests.models.devices import DEVICES, distance
from tests.models.test_norms import everywhere, images

__all__ = ["everywhere"]


class Counting(JoinGradients):
    """Also called in place of a compiler, which takes long to make C++ of it."""

    def __init__(self) -> None:
        self.found = self.handed_on = self.sums = self.attention = 0

    def __call__(self, graph: fx.Graph) -> None:
        super().__call__(graph)
        named = {
            name: [n for n in graph.nodes if str(n.target) == f"lockstep.{name}.default"]
            for name in ("joined_gradient", "norm_backward", "attention_backward")
        }
        self.found += len(named["joined_gradient"])
        self.attention += len(named["attention_backward"])
        handed_on = [n for n in named["norm_backward"] if n.args[-1] is not None]
        self.handed_on += len(handed_on)
        for node in (*named["joined_gradient"], *handed_on):
            # That the compiler keeps to the strides of what the operator was made for.
            strides = [value.stride() for value in node.meta["eager_input_vals"][0]]
            assert strides == [n.meta["val"].stride() for n in node.args]
        sums = [node for node in graph.nodes if node.target is torch.ops.aten.sum.dim_IntList]
        rows = [node.args[0].meta["val"] for node in sums if node.args[1] == [0]]
        self.sums += sum(value.dtype == torch.bfloat16 for value in rows)

    def compile(self, model: nn.Module, device: str) -> None:
        torch._dynamo.reset()
        if device == "cuda":
            model.compile(options={"post_grad_custom_pre_pass": self})
        else:
            model.compile(backend=self._backend())

    def _backend(self) -> Any:
        def backward(module: fx.GraphModule, _: Any) -> Any:
            self(module.graph)
            module.recompile()
            return make_boxed_func(module.forward)

        return aot_autograd(
            fw_compiler=lambda module, _: make_boxed_func(module.forward),
            bw_compiler=backward,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, joins", [("resnet18", 7), ("regnetx_002", 6)])
def test_networks(everywhere: None, name: str, joins: int, device: str) -> None:
    """Blocks with BatchNorm of ours but the last, whose gradient is one number for all pixels."""
    torch.manual_seed(0)
    plain = timm.create_model(name, num_classes=10).to(device, memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    speed_up_norms(fast)
    counting = Counting()
    counting.compile(fast, device)
    x = images(2, 3, 64, 64, dtype=torch.float32, device=device)
    gradients = []
    for network in (fast, plain):
        output = network(x)
        flow = torch.arange(output.numel(), device=device).cos().view_as(output)
        gradients.append(torch.autograd.grad((output * flow).sum(), list(network.parameters())))
    for found, wanted in zip(*gradients, strict=True):
        assert distance(found, wanted) < 1e-2
    assert counting.found == joins


@pytest.mark.parametrize(
    "between, joins",
    [
        (lambda x: x, 1),
        (lambda x: F.channel_shuffle(x, 4).contiguous(memory_format=torch.channels_last), 0),
        (lambda x: x.transpose(2, 3).contiguous(memory_format=torch.channels_last), 0),
        (lambda x: x.flip(3), 0),
    ],
    ids=["nothing", "shuffled channels", "transposed", "mirrored"],
)
def test_only_what_is_meant(everywhere: None, between: Any, joins: int) -> None:
    """BatchNorm's rows must be those of the masked gradient, in their order."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
            self.norm = nn.BatchNorm2d(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = between(self.norm(self.first(x))).relu()
            return self.second(self.second(y) + y)

    torch.manual_seed(0)
    plain = Net().to(memory_format=torch.channels_last)
    fast = copy.deepcopy(plain)
    speed_up_norms(fast)
    counting = Counting()
    counting.compile(fast, "cpu")
    x = images(2, 16, 8, 8, dtype=torch.float32, device="cpu")
    gradients = []
    for network in (fast, plain):
        output = network(x)
        flow = torch.arange(output.numel()).cos().view_as(output)
        gradients.append(torch.autograd.grad((output * flow).sum(), list(network.parameters())))
    for found, wanted in zip(*gradients, strict=True):
        assert distance(found, wanted) < 1e-3
    assert counting.found == joins


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("drop_path", "scale", "residual", "handed_on", "sums"),
    [
        # Blocks drop with 0, a half and all of the rate; the last branch is before no block's norm.
        # Sums that stay are for its bias, the head's, and one within each of three MLPs.
        pytest.param(0.5, None, "low", 3, 5, id="stochastic depth"),
        pytest.param(0.5, None, "fp32", 3, 5, id="stochastic depth, fp32"),
        pytest.param(0.0, None, "low", 0, 5, id="nothing dropped"),
        pytest.param(0.5, 0.1, "low", 0, 10, id="layer scale"),
    ],
)
def test_branches(
    drop_path: float,
    scale: float | None,
    residual: str,
    handed_on: int,
    sums: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a Transformer's branches are given backward, and what their last biases are."""
    monkeypatch.setattr(vit, "trains_in_16_bits", lambda layer, _: layer.training)
    torch.manual_seed(0)
    plain = timm.create_model(
        *("vit_tiny_patch16_224", False), img_size=16, patch_size=4, embed_dim=64, num_heads=2,
        depth=3, num_classes=5, drop_path_rate=drop_path, init_values=scale,
    )  # fmt: skip
    seed_by_sample(plain)
    plain.to(device)
    exact = copy.deepcopy(plain)
    if residual == "low":
        lower_residuals(plain, Precision.model_construct(name="bf16", residual="low"))
    fast = copy.deepcopy(plain)
    vit.speed_up_blocks(fast)
    counting = Counting()
    counting.compile(fast, device)
    x = torch.randn(6, 3, 16, 16, device=device)
    gradients = []
    for network in (exact, plain, fast):
        with torch.autocast(device, torch.bfloat16, enabled=network is not exact):
            output = network(x, seeds=torch.arange(6, device=device)).float()
        gradients.append(torch.autograd.grad(output.square().sum(), list(network.parameters())))
    for wanted, usual, found in zip(*gradients, strict=True):
        bound = 2 * distance(usual, wanted, least=0.1) + 5e-3
        assert distance(found, wanted, least=0.1) < bound
    assert (counting.handed_on, counting.sums) == (handed_on, sums)


class OfItself(torch.autograd.Function):
    """Each image's gradient is made one long."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        length = gradient.float().square().sum((1, 2), keepdim=True).sqrt()
        return gradient * (1 / (length + 1e-6)).to(gradient.dtype)


def _in_turn(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x.transpose(0, 1) * by[: x.shape[1]]).transpose(0, 1)


def _unevenly(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x.reshape(4, -1, 8) * by[:4]).reshape(x.shape)


@pytest.mark.parametrize(
    ("branches", "sizes", "frozen", "handed_on"),
    [
        pytest.param([lambda x, by: x * by[: len(x)]], (2,), "", 1, id="one factor"),
        pytest.param([lambda x, by: x * by[: len(x)]], (2,), "norm", 1, id="frozen norm"),
        pytest.param([lambda x, by: x * by[: len(x)]], (2,), "branch", 1, id="frozen branch"),
        pytest.param([lambda x, by: x * by[: len(x)]], (2, 3, 5), "", 1, id="any batch"),
        pytest.param([lambda x, by: x * by[0] * by[: len(x)]], (2,), "", 0, id="two factors"),
        pytest.param([_in_turn], (2,), "", 0, id="of tokens"),
        pytest.param([_unevenly], (2,), "", 0, id="of parts of images"),
        pytest.param([lambda x, _: OfItself.apply(x)], (2,), "", 0, id="made of the gradient"),
        pytest.param(
            [lambda x, by: x * by[: len(x)], lambda x, by: x * by[-len(x) :]],
            *((2,), "", 1),
            id="two branches",
        ),
    ],
)
def test_only_branches_that_are_meant(
    branches: list[Any], sizes: tuple[int, ...], frozen: str, handed_on: int
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
            self.branch = nn.ModuleList(nn.Linear(16, 16) for _ in branches)
            self.norm = nn.LayerNorm(16)

        def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            x = x + sum(f(layer(x), by) for f, layer in zip(branches, self.branch, strict=True))
            x, normed = vit.residual_norm(x, self.norm)
            return x + self.last(normed)

    torch.manual_seed(0)
    plain = Net()
    if frozen:
        getattr(plain, frozen).requires_grad_(False)
    fast = copy.deepcopy(plain)
    counting = Counting()
    counting.compile(fast, "cpu")
    by = torch.rand(8, 1, 1).bfloat16()
    for size in sizes:
        x = torch.randn(size, 3, 16)
        gradients = []
        for network in (plain, fast):
            parameters = [p for p in network.parameters() if p.requires_grad]
            with torch.autocast("cpu", torch.bfloat16):
                output = network(x, by).float()
            gradients.append(torch.autograd.grad(output.square().sum(), parameters))
        for wanted, found in zip(*gradients, strict=True):
            assert distance(found, wanted, least=0.1) < 2e-2
    assert counting.handed_on == handed_on


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 16, 5, 7), (8, 256, 28, 28), (3, 80, 1, 1)], ids=str)
def test_joined_gradient(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    random = torch.Generator().manual_seed(0)
    last = {"memory_format": torch.channels_last}
    a, b, y, x = (torch.randn(shape, generator=random).to(device, dtype, **last) for _ in range(4))
    rows, mean = x.permute(0, 2, 3, 1).reshape(-1, shape[1]), torch.randn(shape[1], device=device)
    out, sums = joined_gradient(a, b, y.relu(), rows, mean)
    wanted = torch.where(y > 0, a + b, 0)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    flow = out.permute(0, 2, 3, 1).reshape(rows.shape)
    both = sums_of_gradient(flow, rows, mean, mean, mean, relu=False)
    torch.testing.assert_close(sums.sum(0), both, rtol=1e-4, atol=1e-2)
