from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms import InterpolationMode, autoaugment
from torchvision.transforms import v2 as T
from torchvision.transforms.v2 import functional as F

from lockstep.config.schema import Augment
from lockstep.data.augment import _NAMES, NO_BOX, View, _magnitude, apply, draw, eval_image

Make = Callable[..., Augment]
Picture = Callable[..., Image.Image]
MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
SIZES = [(8, 8), (500, 375), (375, 500), (224, 224), (256, 300), (31, 257), (1000, 40), (1, 1)]


def difference(a: Any, b: Any) -> float:
    return float(abs(np.asarray(a, float) - np.asarray(b, float)).mean())


def largest_difference(a: Any, b: Any) -> int:
    return int(abs(np.asarray(a, int) - np.asarray(b, int)).max())


@pytest.mark.parametrize("interpolation", MODES)
@pytest.mark.parametrize("ratio", [1.0, 0.875, 0.95])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_eval_image_is_resize_and_centre_crop(
    picture: Picture, size: tuple[int, int], ratio: float, interpolation: str
) -> None:
    image = picture(*size)
    ours = eval_image(np.asarray(image), View(64, ratio, interpolation))
    short = int(64 / ratio)
    reference = T.Compose([T.Resize(short, MODES[interpolation]), T.CenterCrop(64)])(image)
    assert ours.shape == (64, 64, 3) and ours.dtype == np.uint8
    assert difference(ours, reference) < 0.5


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)], ids=str)
def test_eval_image_of_a_thread_stays_small(size: tuple[int, int]) -> None:
    """Resized as a whole it would be 3.4 billion pixels."""
    image = np.full((size[1], size[0], 3), 255, dtype=np.uint8)
    assert eval_image(image, View(224, 0.875, "bicubic")).shape == (224, 224, 3)


@pytest.mark.parametrize("shift", [(0, 0), (8, -3), (-8, 8)], ids=str)
def test_pad_is_a_crop_of_the_padded_image(picture: Picture, shift: tuple[int, int]) -> None:
    image = picture(64, 64)
    ours = eval_image(np.asarray(image), View(64, 1.0, "bilinear"), shift=shift)
    reference = F.crop(F.pad(image, [8]), 8 - shift[1], 8 - shift[0], 64, 64)
    np.testing.assert_array_equal(ours, reference)


def test_pad_shifts_by_up_to_an_eighth_evenly(augment_config: Make) -> None:
    cfg = augment_config(crop="pad")
    shifts = [draw(cfg, seed, width=9, height=9, size=32).shift for seed in range(2000)]
    for axis in (0, 1):
        values, counts = np.unique([s[axis] for s in shifts], return_counts=True)
        assert values.tolist() == list(range(-4, 5)) and counts.min() > 150


@pytest.mark.parametrize("interpolation", MODES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_random_resized_is_torchvisions_for_the_same_box(
    picture: Picture, augment_config: Make, size: tuple[int, int], interpolation: str
) -> None:
    image, cfg = picture(*size), augment_config(crop="random_resized", hflip=0.5)
    for seed in range(8):
        params = draw(cfg, seed, width=size[0], height=size[1], size=48)
        assert params.crop is not None
        left, top, right, bottom = params.crop
        assert 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
        reference = F.resized_crop(
            image, top, left, bottom - top, right - left, [48, 48], MODES[interpolation]
        )
        if params.flip:
            reference = F.horizontal_flip(reference)
        ours = apply(np.array(image), params, View(48, 1, interpolation))
        assert largest_difference(ours, reference) <= 2 and difference(ours, reference) < 0.5
        assert ours.flags.c_contiguous, "to copy planes into a batch takes longer than to resize"


def test_random_resized_boxes_are_distributed_as_torchvisions(augment_config: Make) -> None:
    cfg = augment_config(crop="random_resized")
    boxes = [draw(cfg, seed, width=120, height=80, size=8).crop for seed in range(2000)]
    ours = np.array([((b[2] - b[0]) * (b[3] - b[1]), b[0], b[1]) for b in boxes if b], float)
    transform = T.RandomResizedCrop(8, scale=cfg.scale, ratio=cfg.ratio)
    image = Image.new("RGB", (120, 80))
    theirs = [transform.make_params([image]) for _ in range(2000)]
    reference = np.array([(p["height"] * p["width"], p["left"], p["top"]) for p in theirs], float)
    np.testing.assert_allclose(ours.mean(0), reference.mean(0), rtol=0.1)
    np.testing.assert_allclose(ours.std(0), reference.std(0), rtol=0.1)


@pytest.mark.parametrize("size", [(100, 1), (1, 100), (50, 10)], ids=str)
def test_shapes_without_a_fitting_box_are_cropped_in_the_middle(
    augment_config: Make, size: tuple[int, int]
) -> None:
    cfg = augment_config(crop="random_resized", scale=(1.0, 1.0))
    box = draw(cfg, 0, width=size[0], height=size[1], size=8).crop
    assert box is not None
    left, top, right, bottom = box
    assert abs(left - (size[0] - right)) <= 1 and abs(top - (size[1] - bottom)) <= 1
    assert min(right - left, bottom - top) == min(size)


def test_resize_is_the_whole_image(picture: Picture, augment_config: Make) -> None:
    image = picture(50, 30)
    params = draw(augment_config(crop="resize"), 0, width=50, height=30, size=32)
    ours = apply(np.array(image), params, View(32, 0.5, "bicubic"))
    reference = image.resize((32, 32), Image.Resampling.BICUBIC)
    assert largest_difference(ours, reference) <= 2 and difference(ours, reference) < 0.5


@pytest.mark.parametrize("policy", ["none", "randaugment", "trivialaugment"])
@pytest.mark.parametrize("crop", ["random_resized", "pad", "resize", "none"])
def test_same_seed_same_pixels(
    picture: Picture, augment_config: Make, crop: str, policy: str
) -> None:
    cfg = augment_config(crop=crop, policy=policy, hflip=0.5, erasing=0.5)
    image, view = picture(40, 30), View(24, 0.9, "bilinear")

    def once(seed: int) -> tuple[Any, bytes]:
        params = draw(cfg, seed, width=40, height=30, size=24)
        return params, apply(np.array(image), params, view).tobytes()

    first = [once(seed) for seed in range(20)]
    np.random.default_rng(0).random()
    assert [once(seed) for seed in reversed(range(20))] == first[::-1]
    assert len({params for params, _ in first}) > 1
    assert all(len(data) == 24 * 24 * 3 for _, data in first)


@pytest.mark.parametrize(
    ("policy", "reference"),
    [
        ("randaugment", autoaugment.RandAugment()),
        ("trivialaugment", autoaugment.TrivialAugmentWide()),
    ],
    ids=["randaugment", "trivialaugment"],
)
def test_operations_are_torchvisions(picture: Picture, policy: str, reference: Any) -> None:
    image = picture(32, 32)
    space = (
        reference._augmentation_space(31, (32, 32))
        if policy == "randaugment"
        else reference._augmentation_space(31)
    )
    assert set(space) == set(_NAMES)
    for name, (magnitudes, signed) in space.items():
        for level in (0, 9, 17, 30):
            theirs = float(magnitudes[level]) if magnitudes.ndim else 0.0
            ours = _magnitude(policy, name, level, 32)
            assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5), name
            for sign in (1, -1) if signed else (1,):
                expected = autoaugment._apply_op(
                    image, name, sign * theirs, InterpolationMode.NEAREST, None
                )
                params = _only(name, sign * theirs)
                got = apply(np.array(image), params, View(32, 1.0, "bilinear"))
                np.testing.assert_array_equal(got, expected, err_msg=f"{name} {level}")


def _only(name: str, magnitude: float) -> Any:
    from lockstep.data.augment import Params

    return Params(crop=None, shift=(0, 0), flip=False, ops=((name, magnitude),), erase=NO_BOX)


def test_policies_use_every_operation(augment_config: Make) -> None:
    rand = augment_config(policy="randaugment", num_ops=3, magnitude=12)
    drawn = [draw(rand, seed, width=8, height=8, size=32).ops for seed in range(300)]
    assert {len(ops) for ops in drawn} == {3}
    assert {name for ops in drawn for name, _ in ops} == set(_NAMES)
    trivial = augment_config(policy="trivialaugment", num_ops=3)
    assert len(draw(trivial, 0, width=8, height=8, size=32).ops) == 1


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_flip_and_erasing_probabilities(augment_config: Make, probability: float) -> None:
    cfg = augment_config(hflip=probability, erasing=probability)
    drawn = [draw(cfg, seed, width=8, height=8, size=64) for seed in range(2000)]
    assert np.mean([p.flip for p in drawn]) == pytest.approx(probability, abs=0.03)
    boxes = [p.erase for p in drawn if p.erase != NO_BOX]
    assert len(boxes) / 2000 == pytest.approx(probability, abs=0.03)
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= 64 and 0 <= top < bottom <= 64
        assert 0.01 < (right - left) * (bottom - top) / 64**2 < 0.36
