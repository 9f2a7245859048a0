from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.schema import Augment
from lockstep.data.mixing import (
    Mixing,
    box_mask,
    draw_mixing,
    is_mixed,
    mix,
    pair_bounds,
)

Make = Callable[..., Augment]
SIZE = 16


def draw(cfg: Augment, start: int, stop: int, **changes: Any) -> Mixing:
    arguments: dict[str, Any] = {"seed": 0, "epoch": 0, "size": SIZE}
    arguments["usable"] = np.ones(stop - start, dtype=bool)
    return draw_mixing(cfg, positions=np.arange(start, stop), **(arguments | changes))


def tensors(mixing: Mixing) -> dict[str, torch.Tensor]:
    return {f.name: torch.from_numpy(getattr(mixing, f.name)) for f in fields(mixing)}


def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, SIZE, SIZE, generator=generator)
    return images, torch.arange(count) % 5


def test_pairs_are_even_and_odd_positions() -> None:
    assert pair_bounds(4, 8, 100) == (4, 8)
    assert pair_bounds(5, 8, 100) == (4, 8)
    assert pair_bounds(4, 7, 100) == (4, 8)
    assert pair_bounds(3, 4, 100) == (2, 4)
    assert pair_bounds(96, 99, 99) == (96, 99)


@pytest.mark.parametrize(
    ("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)], ids=["mixup", "cutmix", "both"]
)
def test_drawing_does_not_depend_on_the_batch(
    augment_config: Make, mixup: float, cutmix: float
) -> None:
    cfg = augment_config(mixup=mixup, cutmix=cutmix)
    whole, part = draw(cfg, 0, 40), draw(cfg, 12, 20)
    np.testing.assert_array_equal(part.partner, [1, 0, 3, 2, 5, 4, 7, 6])
    for name in ("blend", "box", "share"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[12:20])
        np.testing.assert_array_equal(getattr(whole, name)[::2], getattr(whole, name)[1::2])
    cuts = (whole.blend == 0).mean()
    assert cuts == (0 if cutmix == 0 else 1 if mixup == 0 else pytest.approx(0.5, abs=0.4))
    assert (draw(cfg, 0, 40, epoch=1).share != whole.share).any()
    assert (draw(cfg, 0, 40, seed=1).share != whole.share).any()


def test_nobody_is_mixed_with_the_absent_or_unreadable(augment_config: Make) -> None:
    cfg = augment_config(mixup=1.0)
    assert draw(cfg, 4, 9).partner.tolist() == [1, 0, 3, 2, 4]
    assert draw(cfg, 5, 8).partner.tolist() == [0, 2, 1]
    usable = np.array([True, False, True, True])
    assert draw(cfg, 0, 4, usable=usable).partner.tolist() == [0, 1, 3, 2]


def test_mixup_is_the_convex_combination(augment_config: Make) -> None:
    images, targets = batch(6)
    how = draw(augment_config(mixup=0.8), 0, 6)
    mixed, soft = mix(images, targets, 5, **tensors(how))
    onehot = torch.nn.functional.one_hot(targets, 5).float()
    for row in range(6):
        share, other = float(how.share[row]), row ^ 1
        torch.testing.assert_close(mixed[row], (1 - share) * images[row] + share * images[other])
        torch.testing.assert_close(soft[row], (1 - share) * onehot[row] + share * onehot[other])


def test_cutmix_weights_targets_by_the_area_that_is_seen(augment_config: Make) -> None:
    images, targets = batch(40)
    how = draw(augment_config(cutmix=1.0), 0, 40)
    mixed, soft = mix(images, targets, 5, **tensors(how))
    for row in range(40):
        left, top, right, bottom = how.box[row]
        expected = images[row].clone()
        expected[:, top:bottom, left:right] = images[row ^ 1, :, top:bottom, left:right]
        assert torch.equal(mixed[row], expected)
        seen = (mixed[row] != images[row]).all(0).float().mean()
        torch.testing.assert_close(soft[row, targets[row ^ 1]], seen)
    torch.testing.assert_close(soft.sum(1), torch.ones(40))
    assert how.share.min() < 0.3 and how.share.max() > 0.6


def test_one_that_stays_alone_is_unchanged(augment_config: Make) -> None:
    images, targets = batch(1)
    for cfg in (augment_config(mixup=1.0), augment_config(cutmix=1.0)):
        mixed, soft = mix(images, targets, 5, **tensors(draw(cfg, 0, 1)))
        assert torch.equal(mixed, images) and soft.tolist() == [[1, 0, 0, 0, 0]]


def test_box_mask() -> None:
    mask = box_mask(torch.tensor([[1, 0, 3, 2], [0, 0, 0, 0]]), 4)
    assert mask.shape == (2, 1, 4, 4) and not mask[1].any()
    expected = torch.zeros(4, 4, dtype=torch.bool)
    expected[0:2, 1:3] = True
    assert torch.equal(mask[0, 0], expected)


def test_is_mixed(augment_config: Make) -> None:
    assert not is_mixed(augment_config())
    assert is_mixed(augment_config(mixup=0.1)) and is_mixed(augment_config(cutmix=0.1))
