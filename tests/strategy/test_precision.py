"""Number formats and the loss scale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import timm
import torch

from lockstep.errors import UserError
from lockstep.strategy.precision import (
    LossScaler,
    autocast,
    autocast_dtype,
    lower_residuals,
    set_matmul_precision,
    use_fp8,
)
from tests.toys import CPU, precision

GOOD, INF, NAN = torch.tensor(1.0), torch.tensor(torch.inf), torch.tensor(torch.nan)


@pytest.fixture
def _backends() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize(
    "name, dtype, tf32",
    [
        ("fp32", None, False),
        ("tf32", None, True),
        ("bf16", torch.bfloat16, True),
        ("fp16", torch.float16, True),
    ],
)
@pytest.mark.usefixtures("_backends")
def test_number_formats(name: str, dtype: torch.dtype | None, tf32: bool) -> None:
    cfg = precision(name)
    assert autocast_dtype(cfg) is dtype
    set_matmul_precision(cfg)
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    layer = torch.nn.Linear(2, 2)
    with autocast(cfg, CPU):
        assert layer(torch.ones(1, 2)).dtype == (dtype or torch.float32)
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "norms, scales",
    [
        pytest.param([GOOD] * 2, [8, 8], id="steady"),
        pytest.param([GOOD] * 3, [8, 8, 16], id="grows after three good steps"),
        pytest.param([GOOD] * 6, [8, 8, 16, 16, 16, 32], id="and again"),
        pytest.param([INF, GOOD], [4, 4], id="overflow halves"),
        pytest.param([NAN, NAN], [4, 2], id="so does NaN"),
        pytest.param([GOOD, GOOD, INF, GOOD, GOOD, GOOD], [8, 8, 4, 4, 4, 8], id="starts again"),
    ],
)
def test_loss_scale(norms: list[torch.Tensor], scales: list[float]) -> None:
    scaler = LossScaler(precision("fp16", scale=8.0, interval=3))
    found = []
    for norm in norms:
        assert scaler.step_is_good(norm) == bool(torch.isfinite(norm))
        found.append(scaler.scale)
    assert found == scales


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16"])
def test_nothing_is_scaled_without_fp16(name: str) -> None:
    scaler = LossScaler(precision(name))
    assert scaler.step_is_good(NAN), "the recorder stops such a run, with a message"
    assert scaler.scale == 1.0


def test_state_there_and_back() -> None:
    scaler, other = (LossScaler(precision("fp16", scale=8.0)) for _ in range(2))
    for norm in (INF, GOOD, GOOD):
        scaler.step_is_good(norm)
    other.load(scaler.state())
    assert other.state() == scaler.state() == {"scale": 4.0, "good_steps": 2}
    assert other.step_is_good(GOOD) and other.scale == 8.0


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_what_blocks_hand_on(name: str, dtype: torch.dtype) -> None:
    cfg = precision(name, residual="low")
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, num_classes=5)
    lower_residuals(vit, cfg)
    seen: list[torch.dtype] = []
    for block in vit.blocks:
        block.norm1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    images = torch.randn(2, 3, 32, 32)
    with autocast(cfg, CPU):
        vit(images).sum().backward()
    assert seen == [dtype] * 3
    assert {p.grad.dtype for p in vit.parameters() if p.grad is not None} == {torch.float32}
    seen.clear()
    vit(images)
    assert seen == [torch.float32] * 3, "evaluated in fp32, it is fp32"


@pytest.mark.parametrize("name", ["densenet121", "selecsls42"])
def test_blocks_that_are_given_lists(name: str) -> None:
    cfg = precision("bf16", residual="low")
    model = timm.create_model(name, num_classes=5)
    lower_residuals(model, cfg)
    with autocast(cfg, CPU):
        assert model(torch.randn(2, 3, 64, 64)).isfinite().all()


def test_fp8_where_nothing_gains() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5)
    with pytest.raises(UserError, match="no Linear layer of 1024 x 1024"):
        use_fp8(vit, CPU)
