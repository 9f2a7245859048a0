from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.config.schema import Augment
from lockstep.data.augment import NO_BOX, Params, View, apply, axes, draw, eval_image
from lockstep.data.resample import Axis, Target, normalise, resample

Picture = Callable[..., Image.Image]
SIZES = [(8, 8), (60, 45), (45, 60), (24, 24), (31, 257), (300, 40), (1, 1)]
MEAN, STD = torch.tensor([120.0, 110.0, 100.0]), torch.tensor([60.0, 55.0, 50.0])


def shown(images: list[np.ndarray], params: list[Params | None], view: View) -> np.ndarray:
    """[n, S, S, 3] uint8, by ``resample``."""
    windows = [
        [axis.numbers() for axis in axes((image.shape[1], image.shape[0]), p, view)]
        for image, p in zip(images, params, strict=True)
    ]
    out = torch.full((len(images), 3, view.size, view.size), torch.nan)
    resample(
        [torch.from_numpy(image) for image in images],
        np.array(windows, dtype=np.float32),
        np.array([p is not None and p.flip for p in params]),
        interpolation=view.interpolation,
        target=Target(out, MEAN, STD),
        places=np.arange(len(images)),
    )
    pixels = out * STD.view(3, 1, 1) + MEAN.view(3, 1, 1)
    return pixels.round().to(torch.uint8).permute(0, 2, 3, 1).numpy()


def assert_close(ours: np.ndarray, reference: np.ndarray) -> None:
    difference = abs(ours.astype(int) - reference.astype(int))
    assert difference.max() <= 2 and difference.mean() < 0.5


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop", ["random_resized", "resize", "pad", "none"])
def test_shows_what_apply_shows(
    picture: Picture, augment_config: Callable[..., Augment], crop: str, interpolation: str
) -> None:
    view, cfg = View(24, 0.875, interpolation), augment_config(crop=crop, hflip=0.5)
    images = [np.array(picture(*size)) for size in SIZES for _ in range(4)]
    params = [
        draw(cfg, seed, width=image.shape[1], height=image.shape[0], size=24)
        for seed, image in enumerate(images)
    ]
    assert len({p.flip for p in params}) == 2
    for image, p, ours in zip(images, params, shown(images, [*params], view), strict=True):
        assert_close(ours, apply(image, p, view))


@pytest.mark.parametrize("ratio", [1.0, 0.875, 0.5])
def test_shows_what_evaluation_shows(picture: Picture, ratio: float) -> None:
    view = View(24, ratio, "bicubic")
    images = [np.array(picture(*size)) for size in SIZES]
    for image, ours in zip(images, shown(images, [None] * len(images), view), strict=True):
        assert_close(ours, eval_image(image, view))


def test_outside_of_the_image_is_black() -> None:
    white = np.full((32, 32, 3), 255, dtype=np.uint8)
    params = Params(crop=None, shift=(4, -3), flip=False, ops=(), erase=NO_BOX)
    (ours,) = shown([white], [params], View(32, 1.0, "bilinear"))
    assert (ours[:29, 4:] == 255).all() and not ours[29:].any() and not ours[:, :4].any()


def test_a_crop_does_not_look_beside_itself() -> None:
    image = np.zeros((20, 20, 3), dtype=np.uint8)
    image[5:15, 5:15] = 255
    params = Params(crop=(5, 5, 15, 15), shift=(0, 0), flip=False, ops=(), erase=NO_BOX)
    for interpolation in ("bilinear", "bicubic"):
        for size in (4, 7, 40):
            (ours,) = shown([image], [params], View(size, 1.0, interpolation))
            assert (ours == 255).all()


INTERPRETED = """
import numpy as np, torch
from lockstep.data import resample
from lockstep.data.resample import Axis
rng = np.random.default_rng(0)
size, mean, std = 5, torch.tensor([100.0, 90.0, 80.0]), torch.tensor([50.0, 60.0, 70.0])
shapes = [(12, 15), (4, 9), (20, 8)]
images = [torch.from_numpy(rng.integers(0, 256, (*s, 3), dtype=np.uint8)) for s in shapes]
images[1] = images[1].permute(2, 0, 1).contiguous().permute(1, 2, 0)  # planes, as some decoders give
windows = np.array([
    [Axis(2, (w - 5) / size, 2, w - 3, 0, size).numbers(),
     Axis(-3.7, h / size * 1.3, 0, h, 2, size - 1).numbers()]
    for h, w in shapes
], dtype=np.float32)
flips = np.array([True, False, True])
for interpolation in ("bilinear", "bicubic"):
    expected = torch.full((3, 3, size, size), torch.nan).to(memory_format=torch.channels_last)
    ours, places = torch.full_like(expected, torch.nan), np.array([2, 0, 1])
    resample.resample(images, windows, flips, interpolation=interpolation,
                      target=resample.Target(expected, mean, std), places=places)
    resample._launch(images, windows, flips, interpolation,
                     resample.Target(ours, mean, std), places)
    difference = ((ours - expected).abs() * std.view(3, 1, 1)).round()
    assert difference.max() <= 1 and (difference > 0).float().mean() < 0.01, difference.max()
print("alike")
"""


def test_the_kernel_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="needs Triton, which comes with torch for GPUs")
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "alike\n", done.stderr


def test_seen() -> None:
    assert Axis(-2.0, 0.5, 0, 10, 4, 20).seen() == (0.0, 8.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [24, 224, 300])
def test_the_kernel(picture: Any, interpolation: str, size: int) -> None:
    view = View(size, 0.875, interpolation)
    images = [np.array(picture(w * 4, h * 4)) for w, h in SIZES]
    numbers = [[a.numbers() for a in axes(i.shape[1::-1], None, view)] for i in images]
    windows, flips = np.array(numbers, dtype=np.float32), np.arange(len(images)) % 2 == 0
    images[1] = np.moveaxis(np.ascontiguousarray(np.moveaxis(images[1], 2, 0)), 0, 2)
    places = np.roll(np.arange(len(images)), 3)
    expected = torch.full((len(images), 3, size, size), torch.nan)
    got = torch.full_like(expected, torch.nan, device="cuda", memory_format=torch.channels_last)
    options = {"interpolation": interpolation, "places": places}
    resample(
        [torch.from_numpy(i) for i in images],
        windows,
        flips,
        target=Target(expected, MEAN, STD),
        **options,
    )
    resample(
        [torch.from_numpy(i).cuda() for i in images],
        windows,
        flips,
        target=Target(got, MEAN.cuda(), STD.cuda()),
        **options,
    )
    difference = ((got.cpu() - expected).abs() * STD.view(3, 1, 1)).round()
    # Enlarged by a plain ratio, many values lie between two whole numbers: either is right, twice.
    assert difference.max() <= 2 and (difference > 0).float().mean() < 0.02


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_normalise(device: str) -> None:
    pixels = torch.randint(0, 256, (3, 40, 40, 3), dtype=torch.uint8)
    out = torch.full((5, 3, 40, 40), torch.nan, device=device)
    out = out.to(memory_format=torch.channels_last)
    target = Target(out, MEAN.to(device), STD.to(device))
    normalise(pixels.to(device), target=target, places=np.array([4, 0, 2]))
    expected = (pixels.permute(0, 3, 1, 2) - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)
    torch.testing.assert_close(out[[4, 0, 2]].cpu(), expected)
    assert out[[1, 3]].isnan().all()
