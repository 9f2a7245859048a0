"""What happens to images on the device, in batches: erasing, mixup and cutmix. Level 2.

Mixing depends on no batch. The sample at position p of the epoch is mixed with the one at p ^ 1,
and both draw from a hash of (seed, epoch, p >> 1), so that neither the number of processes nor the
size of a micro-batch changes what the model sees. The last sample of an odd epoch stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.config.schema import Augment
from lockstep.data.augment import NO_BOX, Box
from lockstep.data.sampler import sample_seeds

_STREAM = 1
"""Apart from the samples' own seeds (stream 0)."""


@dataclass(frozen=True, slots=True)
class Mixing:
    """How the rows of a batch are mixed; n rows, float32 or int64, on the host."""

    partner: np.ndarray
    """[n] row of the other sample; the row itself where there is none."""
    blend: np.ndarray
    """[n] share of the other's pixels, all over the image (mixup)."""
    box: np.ndarray
    """[n, 4] left, top, right, bottom of what is replaced by the other's pixels (cutmix)."""
    share: np.ndarray
    """[n] share of the other's target."""


def is_mixed(cfg: Augment) -> bool:
    """Whether training mixes samples at all."""
    return cfg.mixup > 0 or cfg.cutmix > 0


def pair_bounds(start: int, stop: int, num_samples: int) -> tuple[int, int]:
    """The least range of positions that holds [start, stop) and everyone's partner."""
    return start & ~1, min(stop + (stop & 1), num_samples)


def draw_mixing(
    cfg: Augment, seed: int, epoch: int, positions: np.ndarray, usable: np.ndarray, size: int
) -> Mixing:
    """Draw how samples are mixed.

    Args:
        positions: [n] int64, consecutive positions of the epoch.
        usable: [n] bool, False for an image that could not be read: its partner stays alone.
        size: side of an image, pixels.
    """
    rows = np.arange(len(positions))
    partner = (positions ^ 1) - positions[0]
    alone = (partner < 0) | (partner >= len(rows))
    partner = np.where(alone, rows, partner)
    partner = np.where(usable & usable[partner], partner, rows)
    pairs, pair_of_row = np.unique(positions >> 1, return_inverse=True)
    seeds = sample_seeds(seed, epoch, pairs, stream=_STREAM)
    drawn = [_draw_pair(cfg, np.random.Generator(np.random.PCG64(s)), size) for s in seeds]
    blend = np.array([d[0] for d in drawn], dtype=np.float32)[pair_of_row]
    box = np.array([d[1] for d in drawn], dtype=np.int64)[pair_of_row]
    share = np.array([d[2] for d in drawn], dtype=np.float32)[pair_of_row]
    return Mixing(partner=partner, blend=blend, box=box, share=share)


def mix(
    images: torch.Tensor,
    targets: torch.Tensor,
    num_classes: int,
    *,
    partner: torch.Tensor,
    blend: torch.Tensor,
    box: torch.Tensor,
    share: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix a batch as drawn; arguments as the fields of :class:`Mixing`, on the images' device.

    mixup: Zhang et al. 2017, arXiv:1710.09412; cutmix: Yun et al. 2019, arXiv:1905.04899.

    Args:
        images: [n, 3, S, S] float32, normalised.
        targets: [n] int64.

    Returns:
        Images [n, 3, S, S] float32 and targets [n, num_classes] float32, each row of sum 1.
    """
    other = images[partner]
    blended = torch.lerp(images, other, blend.view(-1, 1, 1, 1))
    mixed = torch.where(box_mask(box, images.shape[-1]), other, blended)
    soft = torch.zeros(len(targets), num_classes, device=images.device)
    soft.scatter_(1, targets[:, None], 1.0)
    return mixed, torch.lerp(soft, soft[partner], share[:, None])


def box_mask(boxes: torch.Tensor, size: int) -> torch.Tensor:
    """[n, 1, size, size] bool, True inside each of [n, 4] int64 boxes (left, top, right, bottom)."""
    axis = torch.arange(size, device=boxes.device)
    left, top, right, bottom = boxes.unbind(1)
    columns = (axis >= left[:, None]) & (axis < right[:, None])
    rows = (axis >= top[:, None]) & (axis < bottom[:, None])
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def _draw_pair(cfg: Augment, rng: np.random.Generator, size: int) -> tuple[float, Box, float]:
    """Blend, box and target share; mixup or cutmix, evenly where both are on."""
    cut = rng.random() < 0.5 if cfg.mixup > 0 and cfg.cutmix > 0 else cfg.cutmix > 0
    alpha = cfg.cutmix if cut else cfg.mixup
    share = 1.0 - float(rng.beta(alpha, alpha))
    if not cut:
        return share, NO_BOX, share
    half = int(0.5 * math.sqrt(share) * size)
    x, y = (int(centre) for centre in rng.integers(size, size=2))
    left, top = max(x - half, 0), max(y - half, 0)
    right, bottom = min(x + half, size), min(y + half, size)
    # The box may reach over the edge: what counts is the area that is seen.
    return 0.0, (left, top, right, bottom), (right - left) * (bottom - top) / size**2
