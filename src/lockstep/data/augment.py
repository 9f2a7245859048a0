"""What training does to one image, and what evaluation does. Level 2.

Drawing and doing are apart: ``draw`` is a pure function of the sample's own seed and ``apply`` uses
no random numbers, so that a sample looks the same on whichever thread, process or machine.
Geometry and policies follow torchvision (transforms.v2), on Pillow images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.config.schema import Augment

Box = tuple[int, int, int, int]
"""left, top, right, bottom in pixels; right and bottom are outside."""

NO_BOX: Box = (0, 0, 0, 0)
_ATTEMPTS = 10
_ERASING_AREA, _ERASING_ASPECT = (0.02, 0.33), (0.3, 3.3)
_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


@dataclass(frozen=True, slots=True)
class View:
    """How an image becomes a square of ``size`` pixels (``data`` section of the configuration)."""

    size: int
    crop_ratio: float
    interpolation: str

    @property
    def resampling(self) -> Image.Resampling:
        return _RESAMPLING[self.interpolation]


@dataclass(frozen=True, slots=True)
class Params:
    """Everything that was drawn for one sample."""

    crop: Box | None
    """What is resized to the square, in pixels of the image; None: the shifted evaluation crop."""
    shift: tuple[int, int]
    """Right and down, in pixels of the square."""
    flip: bool
    ops: tuple[tuple[str, float], ...]
    """Operations of the policy and their magnitudes."""
    erase: Box
    """In pixels of the square; NO_BOX: nothing. Not ``apply``'s work: it follows normalising."""


def draw(cfg: Augment, seed: int, *, width: int, height: int, size: int) -> Params:
    """Draw one sample's augmentation; the same for the same arguments.

    Args:
        seed: the sample's own.
        width, height: of the image, in pixels.
        size: side of the square it becomes, in pixels.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    crop: Box | None = None
    shift = (0, 0)
    if cfg.crop == "random_resized":
        crop = _random_box(rng, width, height, cfg.scale, cfg.ratio)
        crop = crop or _central_box(width, height, cfg.ratio)
    elif cfg.crop == "resize":
        crop = (0, 0, width, height)
    elif cfg.crop == "pad":
        x, y = rng.integers(-(size // 8), size // 8, size=2, endpoint=True)
        shift = (int(x), int(y))
    flip = bool(rng.random() < cfg.hflip)
    ops = _draw_ops(cfg, rng, size)
    erase = None
    if rng.random() < cfg.erasing:
        erase = _random_box(rng, size, size, _ERASING_AREA, _ERASING_ASPECT)
    return Params(crop=crop, shift=shift, flip=flip, ops=ops, erase=erase or NO_BOX)


def apply(image: Image.Image, params: Params, view: View) -> Image.Image:
    """Do what was drawn, apart from erasing.

    Args:
        image: mode RGB, any size.

    Returns:
        Mode RGB, ``view.size`` x ``view.size``.
    """
    if params.crop is not None:
        image = image.crop(params.crop).resize((view.size, view.size), view.resampling)
    else:
        image = eval_image(image, view, shift=params.shift)
    if params.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    for name, magnitude in params.ops:
        image = _OPS[name](image, magnitude)
    return image


def eval_image(image: Image.Image, view: View, *, shift: tuple[int, int] = (0, 0)) -> Image.Image:
    """Centre crop after resizing the short side to ``size / crop_ratio`` (rounded down, as timm).

    The same pixels as torchvision's Resize and CenterCrop, but computes only those inside the crop:
    cheaper, and an image of 1 x 10,000 stays small.

    Args:
        image: mode RGB, any size.
        shift: moves the image right and down, in pixels of the result; what was outside of it is
            black, as in torchvision's RandomCrop with padding.

    Returns:
        Mode RGB, ``view.size`` x ``view.size``.
    """
    size, short = view.size, min(image.size)
    scaled_short = math.floor(size / view.crop_ratio)
    target, source = [], []
    for length, moved in zip(image.size, shift, strict=True):
        scaled = scaled_short if length == short else int(scaled_short * length / short)
        start = round((scaled - size) / 2) - moved
        first, last = max(start, 0), min(start + size, scaled)
        target.append((first - start, last - start))
        source.append((first * length / scaled, min(last * length / scaled, length)))
    (left, right), (top, bottom) = target
    (x0, x1), (y0, y1) = source
    part = image.resize((right - left, bottom - top), view.resampling, box=(x0, y0, x1, y1))
    if part.size == (size, size):
        return part
    whole = Image.new("RGB", (size, size))
    whole.paste(part, (left, top))
    return whole


def _random_box(
    rng: np.random.Generator,
    width: int,
    height: int,
    area: tuple[float, float],
    aspect: tuple[float, float],
) -> Box | None:
    """A box of random area (as a fraction) and aspect, anywhere (torchvision's RandomResizedCrop).

    None where none fitted in ten attempts.
    """
    for _ in range(_ATTEMPTS):
        pixels = width * height * rng.uniform(*area)
        ratio = math.exp(rng.uniform(math.log(aspect[0]), math.log(aspect[1])))
        w, h = round(math.sqrt(pixels * ratio)), round(math.sqrt(pixels / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(rng.integers(width - w, endpoint=True))
            top = int(rng.integers(height - h, endpoint=True))
            return left, top, left + w, top + h
    return None


def _central_box(width: int, height: int, aspect: tuple[float, float]) -> Box:
    """The largest centred box within the aspect range."""
    w, h = width, height
    if width / height < aspect[0]:
        h = max(1, round(width / aspect[0]))
    elif width / height > aspect[1]:
        w = max(1, round(height * aspect[1]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


# RandAugment (Cubuk et al. 2019, arXiv:1909.13719) and TrivialAugment (Müller and Hutter 2021,
# arXiv:2103.10158) with torchvision's operations and ranges.

_LEVELS = 30
_SIGNED = {"ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"}
_SIGNED |= {"Brightness", "Color", "Contrast", "Sharpness"}


def _geometric(
    shear: Callable[[float], Iterable[float]], shift: Callable[[float], Iterable[int]]
) -> Callable[[Image.Image, float], Image.Image]:
    def op(image: Image.Image, magnitude: float) -> Image.Image:
        turned: Image.Image = F.affine(
            image,
            angle=0.0,
            translate=list(shift(magnitude)),
            scale=1.0,
            shear=list(shear(magnitude)),
            interpolation=InterpolationMode.NEAREST,
            center=[0, 0],
        )
        return turned

    return op


def _degrees(slope: float) -> float:
    return math.degrees(math.atan(slope))


_OPS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "Identity": lambda image, _: image,
    "ShearX": _geometric(lambda m: (_degrees(m), 0.0), lambda m: (0, 0)),
    "ShearY": _geometric(lambda m: (0.0, _degrees(m)), lambda m: (0, 0)),
    "TranslateX": _geometric(lambda m: (0.0, 0.0), lambda m: (int(m), 0)),
    "TranslateY": _geometric(lambda m: (0.0, 0.0), lambda m: (0, int(m))),
    "Rotate": lambda image, m: F.rotate(image, m, interpolation=InterpolationMode.NEAREST),
    "Brightness": lambda image, m: F.adjust_brightness(image, 1 + m),
    "Color": lambda image, m: F.adjust_saturation(image, 1 + m),
    "Contrast": lambda image, m: F.adjust_contrast(image, 1 + m),
    "Sharpness": lambda image, m: F.adjust_sharpness(image, 1 + m),
    "Posterize": lambda image, m: F.posterize(image, int(m)),
    "Solarize": lambda image, m: F.solarize(image, m),
    "AutoContrast": lambda image, _: F.autocontrast(image),
    "Equalize": lambda image, _: F.equalize(image),
}
_NAMES = tuple(_OPS)


def _magnitude(policy: str, name: str, level: int, size: int) -> float:
    """Strength of an operation at a level 0..30, for an image of ``size`` pixels a side."""
    wide = policy == "trivialaugment"
    part = level / _LEVELS
    if name in ("ShearX", "ShearY"):
        return part * (0.99 if wide else 0.3)
    if name in ("TranslateX", "TranslateY"):
        return part * (32.0 if wide else 150 / 331 * size)
    if name == "Rotate":
        return part * (135.0 if wide else 30.0)
    if name in ("Brightness", "Color", "Contrast", "Sharpness"):
        return part * (0.99 if wide else 0.9)
    if name == "Posterize":
        return 8 - round(part * (6 if wide else 4))
    if name == "Solarize":
        return 255.0 * (1 - part)
    return 0.0


def _draw_ops(cfg: Augment, rng: np.random.Generator, size: int) -> tuple[tuple[str, float], ...]:
    if cfg.policy == "none":
        return ()
    ops = []
    for _ in range(cfg.num_ops if cfg.policy == "randaugment" else 1):
        name = _NAMES[rng.integers(len(_NAMES))]
        level = cfg.magnitude
        if cfg.policy == "trivialaugment":
            level = int(rng.integers(_LEVELS, endpoint=True))
        magnitude = _magnitude(cfg.policy, name, level, size)
        negative = rng.random() < 0.5
        ops.append((name, -magnitude if negative and name in _SIGNED else magnitude))
    return tuple(ops)
