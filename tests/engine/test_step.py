"""One optimiser step against torch's own pieces; the digest of its samples."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.config.schema import Ema
from lockstep.data.sampler import MicroSlice, window_slices
from lockstep.engine.state import TrainState
from lockstep.engine.step import StepSums, digest_of, digest_text, micro_step, update
from lockstep.optim.ema import WeightAverage
from lockstep.strategy import Strategy
from tests.toys import CPU, batch_of, network, nowhere, optimizer_config, precision, state_of

IMAGES = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randint(5, (12,), generator=torch.Generator().manual_seed(1))


def accumulate(
    state: TrainState,
    strategy: Strategy,
    *,
    micro: int | None = None,
    number_format: str = "fp32",
    unreadable: int | None = None,
    targets: torch.Tensor = TARGETS,
    smoothing: float = 0.0,
) -> StepSums:
    sums = StepSums.on(CPU)
    slices = window_slices(0, len(IMAGES), micro, 0, 1)
    for i, piece in enumerate(slices):
        micro_step(
            state,
            strategy,
            precision(number_format),
            batch_of(IMAGES, targets, piece, unreadable=unreadable),
            sums,
            window=len(IMAGES),
            last=i == len(slices) - 1,
            label_smoothing=smoothing,
            graphs=None,
            enter=nowhere,
        )
    return sums


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def reference(
    targets: torch.Tensor = TARGETS, *, chosen: Any = slice(None), smoothing: float = 0.0
) -> nn.Module:
    """One big batch, torch alone; samples left out count as zeros in the mean over all."""
    model = network()
    losses = nn.functional.cross_entropy(
        model(IMAGES), targets, reduction="none", label_smoothing=smoothing
    )
    (losses[chosen].sum() / len(IMAGES)).backward()
    return model


# --- gradients --------------------------------------------------------------------------------


@pytest.mark.parametrize("micro", [None, 12, 6, 5, 1])
def test_accumulation_is_exact(micro: int | None) -> None:
    state, strategy = state_of(network())
    sums = accumulate(state, strategy, micro=micro)
    torch.testing.assert_close(gradients(state.model), gradients(reference()))
    assert sums.samples == 12


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_targets(smoothing: float) -> None:
    mixed = torch.rand(12, 5, generator=torch.Generator().manual_seed(2)).softmax(1)
    state, strategy = state_of(network())
    accumulate(state, strategy, micro=5, targets=mixed, smoothing=smoothing)
    expected = gradients(reference(mixed, smoothing=smoothing))
    torch.testing.assert_close(gradients(state.model), expected)


def test_an_unreadable_image_counts_nothing() -> None:
    state, strategy = state_of(network())
    sums = accumulate(state, strategy, micro=5, unreadable=7)
    expected = reference(chosen=torch.arange(12) != 7)
    torch.testing.assert_close(gradients(state.model), gradients(expected))
    assert sums.samples == 11
    assert digest_text(sums.digest) == digest_text(digest_of(i for i in range(12) if i != 7))


@pytest.mark.parametrize("norm", [False, True], ids=["no BatchNorm", "BatchNorm"])
def test_a_dummy_changes_nothing(norm: bool) -> None:
    state, strategy = state_of(network(batchnorm=norm))
    before = copy.deepcopy(state.model.state_dict())
    sums = StepSums.on(CPU)
    dummy = batch_of(IMAGES, TARGETS, MicroSlice(12, 12, 4))
    micro_step(
        state,
        strategy,
        precision(),
        dummy,
        sums,
        window=12,
        last=True,
        label_smoothing=0.0,
        graphs=None,
        enter=nowhere,
    )
    after = state.model.state_dict()
    for name in before:
        assert "tracked" in name or torch.equal(after[name], before[name]), name
    assert all(not g.any() for g in gradients(state.model).values())
    assert (sums.samples, float(sums.loss), digest_text(sums.digest)) == (0, 0.0, "0" * 24)


def test_a_lone_sample_of_a_batchnorm_model() -> None:
    """BatchNorm takes it twice; the loss counts it once."""
    state, strategy = state_of(network(batchnorm=True))
    sums = StepSums.on(CPU)
    lone = batch_of(IMAGES, TARGETS, MicroSlice(3, 4, 0))
    micro_step(
        state,
        strategy,
        precision(),
        lone,
        sums,
        window=1,
        last=True,
        label_smoothing=0.0,
        graphs=None,
        enter=nowhere,
    )
    model = network(batchnorm=True)
    loss = nn.functional.cross_entropy(model(IMAGES[[3, 3]]), TARGETS[[3, 3]])
    loss.backward()
    torch.testing.assert_close(gradients(state.model), gradients(model))
    assert sums.samples == 1
    assert float(sums.loss) == pytest.approx(loss.item())


def test_what_is_drawn_depends_on_the_sample_not_on_what_was_drawn_before() -> None:
    """Dropout, say, in a run that was resumed."""
    grads = []
    for seed in (1, 2):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(48, 5))
        torch.nn.init.ones_(model[2].weight)
        torch.nn.init.zeros_(model[2].bias)
        model.register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)
        state, strategy = state_of(model)
        torch.manual_seed(seed)
        accumulate(state, strategy, micro=5)
        grads.append(gradients(model))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


# --- update -----------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.05, 100.0])
def test_update_against_torch(clip: float | None) -> None:
    cfg = optimizer_config("sgd", kwargs={"momentum": 0.9})
    state, strategy = state_of(network(), optimizer=cfg)
    model, seen = reference(), []
    optimizer = torch.optim.SGD(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.3,
        momentum=0.9,
    )
    for _ in range(2):
        accumulate(state, strategy)
        seen.append(
            float(
                update(
                    state,
                    strategy,
                    lr=0.3,
                    clip=clip,
                    num_micro_batches=1,
                    leave_out=False,
                    check_loss=None,
                )
            )
        )
    assert state.progress.step == 2 and state.progress.micro_batches == 2
    assert not gradients(state.model)
    expected = []
    for i in range(2):
        if i:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(IMAGES), TARGETS).backward()
        limit = clip if clip is not None else torch.inf
        expected.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    assert seen == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(dict(state.model.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_loss_scale_leaves_no_trace(clip: float | None) -> None:
    """fp32 arithmetic under fp16's scaler, 1024 being a power of two: the very same numbers."""
    scaled, strategy = state_of(network(), number_format=precision("fp16", scale=1024.0))
    plain, other = state_of(network())
    norms = []
    for state, using in ((scaled, strategy), (plain, other)):
        accumulate(state, using)
        norms.append(
            float(
                update(
                    state,
                    using,
                    lr=0.3,
                    clip=clip,
                    num_micro_batches=1,
                    leave_out=False,
                    check_loss=None,
                )
            )
        )
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    torch.testing.assert_close(
        dict(scaled.model.named_parameters()), dict(plain.model.named_parameters())
    )


def test_an_overflow_skips_the_update_alone() -> None:
    state, strategy = state_of(network(), number_format=precision("fp16", scale=1024.0))
    accumulate(state, strategy)
    next(state.model.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
    before = copy.deepcopy(state.model.state_dict())
    norm = update(
        state, strategy, lr=0.3, clip=1.0, num_micro_batches=2, leave_out=False, check_loss=None
    )
    assert not torch.isfinite(norm)
    torch.testing.assert_close(state.model.state_dict(), before, rtol=0, atol=0)
    assert state.scaler.scale == 512.0
    assert not gradients(state.model)
    assert (state.progress.step, state.progress.micro_batches) == (1, 2)


def test_update_moves_the_average_and_ends_the_window() -> None:
    state, strategy = state_of(network(batchnorm=True))
    state.ema = WeightAverage(state.model, [], Ema(enabled=True, decay=0.5, warmup=False))
    before = {n: p.detach().clone() for n, p in state.model.named_parameters()}
    accumulate(state, strategy, micro=5)
    update(
        state, strategy, lr=0.3, clip=None, num_micro_batches=3, leave_out=False, check_loss=None
    )
    for name, parameter in state.model.named_parameters():
        expected = 0.5 * before[name] + 0.5 * parameter.detach()
        torch.testing.assert_close(state.ema.shadow[name], expected)
    accumulate(state, strategy, micro=5)  # would fail if the window had not ended


# --- digest -----------------------------------------------------------------------------------

IDS = [0, 1, 17, 1_281_166, 2**40]


def test_the_digest_is_pinned() -> None:
    """Two versions must be able to compare their runs line by line."""
    assert digest_text(digest_of(IDS)) == "9ad95a010e455613b0f6fa0c"


def test_order_and_parts_do_not_matter() -> None:
    whole = digest_text(digest_of(IDS))
    assert digest_text(digest_of(IDS[::-1])) == whole
    assert digest_text(digest_of(IDS[:2]) + digest_of(IDS[2:])) == whole
    assert digest_text(digest_of(np.array(IDS))) == whole
    assert digest_text(digest_of([])) == "0" * 24


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(IDS[1:], id="one missing"),
        pytest.param([*IDS, 17], id="one twice"),
        pytest.param([0, 1, 18, 1_281_166, 2**40], id="another"),
        pytest.param([0, 0, 18, 1_281_166, 2**40], id="same sum"),
    ],
)
def test_other_samples_have_another_digest(other: list[int]) -> None:
    assert digest_text(digest_of(other)) != digest_text(digest_of(IDS))


def test_no_two_of_many_windows_share_a_digest() -> None:
    digests = {digest_text(digest_of(range(i, i + 3))) for i in range(2000)}
    assert len(digests) == 2000


def test_sums_over_many_ranks_stay_exact() -> None:
    part = np.full(4, float((1 << 24) - 1))
    total = sum(int(p) for p in [(1 << 24) - 1] * 4096) % (1 << 24)
    assert digest_text(np.sum([part] * 4096, axis=0)) == f"{total:06x}" * 4
