"""What a decoding thread or process does: from a sample's file to its square of pixels. Level 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.config.schema import Augment, Data
from lockstep.data.augment import NO_BOX, Params, View, apply, axes, draw, eval_image
from lockstep.data.cache import RamCache
from lockstep.data.decode import DecodeError, decode, decode_part, jpeg_size
from lockstep.data.source import Source
from lockstep.data.workers import Filled
from lockstep.errors import UserError


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the squares of n samples lie in images that the device holds."""

    windows: np.ndarray
    """[n, 2, 6] float32: see ``resample``."""
    flips: np.ndarray
    """[n] bool."""
    erase: np.ndarray
    """[n, 4] int64."""

    @classmethod
    def joined(cls, parts: Sequence[Placed]) -> Placed:
        """Those of several, in order."""
        return cls(
            np.concatenate([np.zeros((0, 2, 6), np.float32), *(p.windows for p in parts)]),
            np.concatenate([np.zeros(0, bool), *(p.flips for p in parts)]),
            np.concatenate([np.zeros((0, 4), np.int64), *(p.erase for p in parts)]),
        )


class Filler:
    """Reads, decodes and augments; knows no batches and no device."""

    def __init__(self, source: Source, data: Data, augment: Augment | None, view: View) -> None:
        """
        Args:
            augment: None for the evaluation crop.
        """
        self.source = source
        self.view = view
        self._augment = augment
        self._data = data
        self._cache = RamCache(len(source), data.cache)

    def __call__(self, indices: np.ndarray, seeds: np.ndarray, pixels: np.ndarray) -> Filled:
        """Fill ``pixels`` [rows, S, S, 3] uint8 with the samples ``indices``.

        Raises:
            UserError: an image cannot be read and ``data.on_error`` is ``stop``.
        """
        filled = Filled(np.zeros((len(indices), 4), dtype=np.int64), {})
        for row, (index, seed) in enumerate(zip(indices.tolist(), seeds.tolist(), strict=True)):
            try:
                image, params = self._sample(index, seed)
            except DecodeError as error:
                filled.reasons[row] = self.refused(index, error)
                pixels[row] = 0
                continue
            if params is None:
                pixels[row] = eval_image(image, self.view)
            else:
                pixels[row] = apply(image, params, self.view)
                filled.erase[row] = params.erase
        return filled

    def _sample(self, index: int, seed: int) -> tuple[np.ndarray, Params | None]:
        """The image, or as much of it as is wanted, and what is done to that."""
        image = self._cache.get(index)
        if image is None:
            data = self.read(index)
            if self._augment is not None and not self._cache.takes_more:
                found = self._part(data, seed)
                if found is not None:
                    return found
            image = self._decoded(index, data)
        height, width, _ = image.shape
        return image, self.draw(seed, width=width, height=height)

    def _part(self, data: bytes, seed: int) -> tuple[np.ndarray, Params] | None:
        size = jpeg_size(data, exif_rotate=self._data.exif_rotate)
        if size is None:
            return None
        height, width = size
        params = self.draw(seed, width=width, height=height)
        if params is None or params.crop is None or params.crop == (0, 0, width, height):
            return None
        image = decode_part(data, params.crop)
        if image is None:
            return None
        return image, replace(params, crop=(0, 0, image.shape[1], image.shape[0]))

    def draw(self, seed: int, *, width: int, height: int) -> Params | None:
        """What is done to a sample of this size; None: the evaluation crop."""
        if self._augment is None:
            return None
        return draw(self._augment, seed, width=width, height=height, size=self.view.size)

    def place(self, seed: int, *, width: int, height: int) -> Placed:
        """What the workers do to a sample of this size, for the device to do."""
        params = self.draw(seed, width=width, height=height)
        across, down = axes((width, height), params, self.view)
        return Placed(
            np.array([[across.numbers(), down.numbers()]], dtype=np.float32),
            np.array([params is not None and params.flip]),
            np.array([NO_BOX if params is None else params.erase], dtype=np.int64),
        )

    def image(self, index: int) -> np.ndarray:
        """[H, W, 3] uint8; raises DecodeError."""
        image = self._cache.get(index)
        return self._decoded(index, self.read(index)) if image is None else image

    def _decoded(self, index: int, data: bytes) -> np.ndarray:
        image = decode(data, exif_rotate=self._data.exif_rotate)
        self._cache.put(index, image)
        return image

    def read(self, index: int) -> bytes:
        """The file; raises DecodeError, or UserError where not this file alone is gone."""
        try:
            return self.source.read(index)
        except OSError as error:
            folder = self.source.folder
            if gone := [f for f in (folder.parent, folder) if not f.exists()]:
                raise UserError(
                    f"data.root = {folder.parent}: {gone[0]} is gone: bring it back (is it mounted?) "
                    "and run the same command, which goes on from the newest checkpoint"
                ) from error
            raise DecodeError(error.strerror or str(error)) from error

    def refused(self, index: int, error: DecodeError) -> str:
        """Why a sample is left out, unless that ends the run."""
        if self._data.on_error == "stop":
            raise UserError(
                f"{self.source.path(index)} cannot be read: {error}: repair or remove it, "
                "or set data.on_error=skip to go on without such images"
            ) from error
        return str(error)
