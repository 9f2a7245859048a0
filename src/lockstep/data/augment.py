"""What training does to one image, and what evaluation does. Level 2.

Drawing and doing are apart: ``draw`` is a pure function of the sample's own seed and ``apply`` uses
no random numbers, so that a sample looks the same on whichever thread, process or machine of a kind.
Geometry and policies follow torchvision (transforms.v2). Images are arrays [height, width, 3] of
uint8, RGB; a random crop is resized by torch, twice as fast as by Pillow and within one step of 255.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from lockstep.config.schema import Augment
from lockstep.data.resample import Axis

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


def apply(image: np.ndarray, params: Params, view: View) -> np.ndarray:
    """Do what was drawn, apart from erasing.

    Args:
        image: [height, width, 3] uint8, any size.

    Returns:
        [S, S, 3] uint8, S = ``view.size``.
    """
    if params.crop is not None:
        image = _resize(image, params.crop, view)
    else:
        image = eval_image(image, view, shift=params.shift)
    if params.flip:
        image = _mirrored(image)
    if params.ops:
        shown = Image.fromarray(image)
        for name, magnitude in params.ops:
            shown = _OPS[name](shown, magnitude)
        image = np.asarray(shown)
    return image


def _mirrored(image: np.ndarray) -> np.ndarray:
    """Left and right. By torch: numpy, three bytes at a time, takes longer than the resizing."""
    writable = image if image.flags.writeable else image.copy()
    result: np.ndarray = torch.from_numpy(writable).flip(1).numpy()
    return result


def _resize(image: np.ndarray, box: Box, view: View) -> np.ndarray:
    left, top, right, bottom = box
    # Copied here unless it is all: torch would do it with threads of its own, beside the decoders.
    part = np.ascontiguousarray(image[top:bottom, left:right])
    # Batched before the axes turn: only then torch sees channels last, and answers with the same.
    # Planes would take it twice as long, and as long again to be put into the batch.
    pixels = torch.from_numpy(part)[None].permute(0, 3, 1, 2)
    square = interpolate(
        pixels, (view.size, view.size), mode=view.interpolation, antialias=True, align_corners=False
    )
    result: np.ndarray = square[0].permute(1, 2, 0).numpy()
    return result


def eval_image(image: np.ndarray, view: View, *, shift: tuple[int, int] = (0, 0)) -> np.ndarray:
    """Centre crop after resizing the short side to ``size / crop_ratio`` (rounded down, as timm).

    The same pixels as torchvision's Resize and CenterCrop of Pillow images, but computes only those
    inside the crop: cheaper, and an image of 1 x 10,000 stays small.

    Args:
        image: [height, width, 3] uint8, any size.
        shift: moves the image right and down, in pixels of the result; what was outside of it is
            black, as in torchvision's RandomCrop with padding.

    Returns:
        [S, S, 3] uint8, S = ``view.size``.
    """
    height, width, _ = image.shape
    across, down = eval_axes(width, height, view, shift=shift)
    shape = (across.last - across.first, down.last - down.first)
    part = np.asarray(Image.fromarray(image).resize(shape, view.resampling, _box(across, down)))
    if shape == (view.size, view.size):
        return part
    whole = np.zeros((view.size, view.size, 3), dtype=np.uint8)
    whole[down.first : down.last, across.first : across.last] = part
    return whole


def _box(across: Axis, down: Axis) -> tuple[float, float, float, float]:
    (left, right), (top, bottom) = across.seen(), down.seen()
    return left, top, right, bottom


def axes(image_size: tuple[int, int], params: Params | None, view: View) -> tuple[Axis, Axis]:
    """Where the square lies in an image of some width and height, across and down.

    What ``apply`` (None: ``eval_image``) shows but for mirroring and operations; for many images at once.
    """
    width, height = image_size
    if params is None or params.crop is None:
        return eval_axes(width, height, view, shift=params.shift if params else (0, 0))
    left, top, right, bottom = params.crop
    size = view.size
    return (
        Axis(left, (right - left) / size, left, right, 0, size),
        Axis(top, (bottom - top) / size, top, bottom, 0, size),
    )


def eval_axes(width: int, height: int, view: View, *, shift: tuple[int, int]) -> tuple[Axis, Axis]:
    """Where the evaluation crop lies in an image, across and down."""
    size, short = view.size, min(width, height)
    scaled_short = math.floor(size / view.crop_ratio)
    found = []
    for length, moved in zip((width, height), shift, strict=True):
        scaled = scaled_short if length == short else int(scaled_short * length / short)
        start = round((scaled - size) / 2) - moved
        first, last = max(-start, 0), min(size, scaled - start)
        step = length / scaled
        found.append(Axis(start * step, step, 0, length, first, last))
    return found[0], found[1]


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
