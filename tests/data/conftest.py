"""Small folders of images and configuration sections for the tests of the data room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lockstep.config.schema import Augment, Data


@pytest.fixture
def data_config() -> Callable[..., Data]:
    """The ``data`` section with some keys changed."""

    def make(**changes: Any) -> Data:
        values: dict[str, Any] = {
            "name": "folder",
            "root": "unused",
            "source": "folder",
            "decode": "cpu",
            "gpu_share": None,
            "shuffle_block": 1,
            "worker_kind": "auto",
            "cache": "auto",
            "image_size": 16,
            "num_classes": None,
            "num_train": None,
            "num_val": None,
            "mean": (0.5, 0.4, 0.3),
            "std": (0.25, 0.2, 0.1),
            "crop_ratio": 0.875,
            "interpolation": "bilinear",
            "on_error": "stop",
            "exif_rotate": True,
            "workers": None,
            "prefetch": 2,
        }
        return Data(**(values | changes))

    return make


@pytest.fixture
def augment_config() -> Callable[..., Augment]:
    """The ``augment`` section with some keys changed; by default nothing happens."""

    def make(**changes: Any) -> Augment:
        values: dict[str, Any] = {
            "crop": "none",
            "scale": (0.08, 1.0),
            "ratio": (0.75, 1.3333),
            "hflip": 0.0,
            "policy": "none",
            "num_ops": 2,
            "magnitude": 9,
            "erasing": 0.0,
            "mixup": 0.0,
            "cutmix": 0.0,
            "label_smoothing": 0.0,
        }
        return Augment(**(values | changes))

    return make


@pytest.fixture(scope="session")
def picture() -> Callable[..., Image.Image]:
    """A smooth random RGB image of any size: every pixel tells where it is."""

    def make(width: int, height: int, seed: int = 0) -> Image.Image:
        rng = np.random.default_rng(seed)
        coarse = rng.integers(0, 256, size=(7, 7, 3), dtype=np.uint8)
        return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)

    return make


@pytest.fixture(scope="session")
def image_root(tmp_path_factory: pytest.TempPathFactory, picture: Any) -> Path:
    """23 training and 7 validation images of three classes and different sizes. Do not change."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 23), ("val", 7)):
        for i in range(count):
            folder = root / split / f"class{i % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            picture(20 + i, 40 - i, seed=i).save(folder / f"{i:02d}.png")
    return root
