"""Stochastic depth: a sample's own decision, whoever computes it and with whom."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn

from lockstep.models.stochastic import SampleDropPath, hash_uniform, seed_by_sample


class Residuals(nn.Module):
    """Each layer adds 1, 10, 100, ... to a sample unless its path is dropped."""

    def __init__(self, rates: list[float], scale_by_keep: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.paths = nn.ModuleList(DropPath(rate, scale_by_keep) for rate in rates)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = [path(x.new_full(x.shape, 10.0**i)) for i, path in enumerate(self.paths)]
        return x + sum(added)


def seeded(*rates: float, scale_by_keep: bool = False) -> nn.Module:
    model = Residuals(list(rates), scale_by_keep)
    seed_by_sample(model)
    return model


SEEDS = torch.randint(2**62, (4096,), generator=torch.Generator().manual_seed(0))


def test_the_hash_is_pinned() -> None:
    """A change would silently change every run that is resumed."""
    seeds = torch.tensor([0, 1, 2**40, 2**63 - 1])
    assert (hash_uniform(seeds, 3) * 2**24).long().tolist() == [514585, 378508, 217446, 3575395]


def test_the_hash_is_uniform_and_layers_are_independent() -> None:
    numbers = torch.stack([hash_uniform(SEEDS, layer) for layer in range(8)])
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = torch.stack([torch.histc(n, 16, 0, 1) for n in numbers])
    assert (counts - 256).abs().max() < 5 * 256**0.5
    correlation = torch.corrcoef(numbers) - torch.eye(8)
    assert correlation.abs().max() < 5 / len(SEEDS) ** 0.5


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_rate(rate: float) -> None:
    kept = seeded(rate)(torch.zeros(len(SEEDS), 1), seeds=SEEDS).mean().item()
    deviation = (rate * (1 - rate) / len(SEEDS)) ** 0.5
    assert kept == pytest.approx(1 - rate, abs=5 * deviation)


def test_the_expectation_is_kept_when_scaled() -> None:
    out = seeded(0.2, scale_by_keep=True)(torch.zeros(len(SEEDS), 1), seeds=SEEDS)
    assert sorted(out.unique().tolist()) == pytest.approx([0, 1 / 0.8])
    assert out.mean().item() == pytest.approx(1, abs=0.05)


def test_a_sample_is_treated_alike_in_any_batch() -> None:
    model = seeded(0.5, 0.5, 0.5)
    x = torch.zeros(64, 2, 2)
    seeds = SEEDS[:64]
    whole = model(x, seeds=seeds)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model(x, seeds=seeds[order]), whole[order])
    parts = [model(x[:n], seeds=s) for n, s in zip((5, 59), seeds.split([5, 59]), strict=True)]
    assert torch.equal(torch.cat(parts), whole)
    torch.manual_seed(99)
    assert torch.equal(model(x, seeds=seeds), whole)
    assert len(whole[:, 0, 0].unique()) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_type_is_kept(dtype: torch.dtype) -> None:
    path = SampleDropPath()
    path.factor = torch.tensor([0.0, 1.25])
    assert path(torch.ones(2, 3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("seeds", [None, SEEDS[:8]], ids=["without seeds", "with seeds"])
def test_nothing_is_dropped_in_evaluation(seeds: torch.Tensor | None) -> None:
    model = seeded(0.9).eval()
    assert model(torch.zeros(8, 1), seeds=seeds).eq(1).all()


def test_training_without_seeds_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="without seeds"):
        seeded(0.1)(torch.zeros(2, 1))


def test_a_rate_of_zero_needs_no_seeds() -> None:
    assert seeded(0.0)(torch.zeros(2, 1)).eq(1).all()


def test_a_path_with_two_names_is_replaced_under_both() -> None:
    model = Residuals([0.5])
    model.again = model.paths
    model.paths.add_module("1", model.paths[0])
    seed_by_sample(model)
    assert not any(isinstance(m, DropPath) for m in model.modules())


@pytest.mark.parametrize(
    "name",
    [
        "vit_tiny_patch16_224",
        "resnet18",
        "convnext_atto",
        "swin_tiny_patch4_window7_224",
        "regnety_002",
        "efficientnet_b0",
        "eva02_tiny_patch14_224",
        "cait_xxs24_224",
        "poolformer_s12",
        "nextvit_small",
        "volo_d1_224",
    ],
)
def test_every_drop_path_of_timm_is_replaced(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, drop_path_rate=0.3)
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath)]
    names = list(model.state_dict())
    seed_by_sample(model)
    assert not any(isinstance(m, DropPath) for m in model.modules())
    replaced = sum(isinstance(m, SampleDropPath) for m in model.modules())
    assert replaced == sum(rate > 0 for rate in rates) > 0
    assert list(model.state_dict()) == names


def test_the_rates_of_timm_are_kept() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=3, drop_path_rate=0.4)
    rates = [m.drop_prob for m in model.modules() if isinstance(m, DropPath) and m.drop_prob]
    seed_by_sample(model)
    keep, scale = model.drop_path_keep_and_scale
    assert keep.tolist() == pytest.approx([1 - rate for rate in rates])
    assert (keep * scale).tolist() == pytest.approx([1] * len(rates))
