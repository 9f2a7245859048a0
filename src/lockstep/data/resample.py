"""Many images at once, resized, mirrored, normalised: one kernel a batch. Level 2.

Antialiased as Pillow's and torch's resizing of bytes is: an output pixel is the mean of the source
pixels within reach, weighted by a filter that is as wide as the image shrinks, first across, then
down, rounded to whole numbers within 0..255 after each. Their weights are whole numbers, too:
results differ by one step of 255 now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

RADIUS = {"bilinear": 1.0, "bicubic": 2.0}
"""Reach of the filter, in pixels of whichever of source and result is coarser."""
_BLOCK = 4096
_BICUBIC_A = -0.5
"""Pillow's, and torch's where it antialiases."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Where the S pixels of a result lie in a source, along one axis."""

    origin: float
    """Of the first result pixel's near edge, in source pixels."""
    step: float
    """Source pixels for each result pixel."""
    low: int
    """No source pixel before this one is looked at,"""
    high: int
    """nor this one or any after it."""
    first: int
    """Result pixels before this one are black,"""
    last: int
    """and from this one on."""

    def seen(self) -> tuple[float, float]:
        """From where to where the result shows the source, in source pixels."""
        near, far = self.origin + self.first * self.step, self.origin + self.last * self.step
        return max(near, self.low), min(far, self.high)

    def numbers(self) -> tuple[float, ...]:
        """For a row of ``windows``."""
        return self.origin, self.step, self.low, self.high, self.first, self.last


@dataclass(frozen=True, slots=True)
class Target:
    """Normalised squares that are to be filled."""

    out: torch.Tensor
    """[m, 3, S, S] float32, channels last on CUDA."""
    mean: torch.Tensor
    """[3] float32, of pixels in 0..255, on the device."""
    std: torch.Tensor
    """[3], alike."""


def resample(
    images: list[torch.Tensor],
    windows: np.ndarray,
    flips: np.ndarray,
    *,
    interpolation: str,
    target: Target,
    places: np.ndarray,
) -> None:
    """Resize a window of each image to a square, and normalise it.

    Args:
        images: n of [H, W, 3] uint8, of any sizes and strides, on the device.
        windows: [n, 2, 6] float32: :meth:`Axis.numbers` across and down.
        flips: [n] bool: mirrored, left and right.
        places: [n] int64: which of the target's each becomes.
    """
    if not images:
        return
    if target.out.is_cuda:
        _launch(images, windows, flips, interpolation, target, places)
        return
    for i, image in enumerate(images):
        square = _by_matrices(image, windows[i], target.out.shape[-1], interpolation)
        square = square.flip(2) if flips[i] else square
        target.out[places[i]] = _normalised(square, target)


def normalise(pixels: torch.Tensor, *, target: Target, places: np.ndarray) -> None:
    """Normalise squares.

    Args:
        pixels: [n, S, S, 3] uint8, on the device.
        places: [n] int64: which of the target's each becomes.
    """
    if not len(pixels):
        return
    if target.out.is_cuda:
        from lockstep.data.kernels import normalise_kernel  # Triton: only where there is a GPU

        where = to_device(torch.from_numpy(places), pixels.device)
        count = pixels[0].numel()
        grid = (len(pixels), -(-count // _BLOCK))
        normalise_kernel[grid](
            target.out, pixels, where, target.mean, target.std, count, BLOCK=_BLOCK
        )
        return
    for square, place in zip(pixels, places.tolist(), strict=True):  # each fits into a core's cache
        _normalised(target.out[place].copy_(square.permute(2, 0, 1)), target)


def _normalised(square: torch.Tensor, target: Target) -> torch.Tensor:
    return square.sub_(target.mean.view(3, 1, 1)).div_(target.std.view(3, 1, 1))


def _by_matrices(
    image: torch.Tensor, window: np.ndarray, size: int, interpolation: str
) -> torch.Tensor:
    """[3, S, S] float32, whole numbers 0..255: the definition, which the kernel computes too."""
    across, down = (
        _weights(Axis(*axis), size, interpolation).to(image.device) for axis in window.tolist()
    )
    pixels = image[: down.shape[1], : across.shape[1]].permute(2, 0, 1).to(torch.float32)
    return _whole(down @ _whole(pixels @ across.T))


def _whole(pixels: torch.Tensor) -> torch.Tensor:
    return (pixels + 0.5).floor().clamp_(0, 255)


def _weights(axis: Axis, size: int, interpolation: str) -> torch.Tensor:
    """[S, high] float32: each row is what a result pixel takes of the source's."""
    scale = max(axis.step, 1.0)
    reach = RADIUS[interpolation] * scale
    centre = axis.origin + (np.arange(size) + 0.5) * axis.step
    low = np.maximum(np.floor(centre - reach + 0.5), axis.low)[:, None]
    high = np.minimum(np.floor(centre + reach + 0.5), axis.high)[:, None]
    at = np.arange(int(axis.high))[None]
    weights = _filter((at - centre[:, None] + 0.5) / scale, interpolation)
    weights = np.where((at >= low) & (at < high), weights, 0.0)
    weights /= np.maximum(weights.sum(1, keepdims=True), 1e-12)
    outside = (np.arange(size) < axis.first) | (np.arange(size) >= axis.last)
    weights[outside] = 0.0
    return torch.from_numpy(weights.astype(np.float32))


def _filter(x: np.ndarray, interpolation: str) -> np.ndarray:
    x = abs(x)
    if interpolation == "bilinear":
        x = np.maximum(1 - x, 0.0)
        return x
    a = _BICUBIC_A
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    values: np.ndarray = np.where(x < 1, near, np.where(x < 2, far, 0.0))
    return values


# --- the kernel -------------------------------------------------------------------------------


def _launch(
    images: list[torch.Tensor],
    windows: np.ndarray,
    flips: np.ndarray,
    interpolation: str,
    target: Target,
    places: np.ndarray,
) -> None:
    size, count = target.out.shape[-1], len(images)
    # All that a sample's program needs lies in one row, so that one copy takes it to the device.
    rows = np.array([(image.data_ptr(), *image.stride()) for image in images], dtype=np.int64)
    numbers = np.concatenate(
        [windows.reshape(count, 12), flips[:, None], places[:, None]], axis=1, dtype=np.float32
    )
    block = min(256, 1 << (size - 1).bit_length())
    grid = (count, size, -(-size // block))
    from lockstep.data.kernels import resample_kernel  # Triton: only where there is a GPU

    resample_kernel[grid](
        target.out,
        to_device(torch.from_numpy(rows), target.out.device),
        to_device(torch.from_numpy(numbers), target.out.device),
        target.mean,
        target.std,
        size,
        BLOCK=block,
        BICUBIC=interpolation == "bicubic",
    )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Without waiting for the device, which a copy from unpinned memory does."""
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
