"""JPEGs decoded by the GPU's own decoders, beside the training. Level 2.

nvJPEG through torchvision: a batch of files in, one tensor an image out. What it is not made for,
and every batch that it refuses, the CPU decodes.
"""

from __future__ import annotations

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torchvision.io import ImageReadMode, decode_jpeg

from lockstep.data.augment import axes
from lockstep.data.decode import DecodeError, suits_gpu
from lockstep.data.fill import Filler

_THREADS = 2
"""One reads files while the other waits for the decoder."""

_BESIDE_TRAINING = 0.25
"""What is left of the decoder's pace while the GPU trains: its kernels wait behind the training's."""
_ENOUGH = 10_000
"""Images per second of the CPU that no model of a GPU outpaces at the usual sizes."""
_LEAST_SHARE = 0.05

# That a successor exists is for whoever maintains this file.
warnings.filterwarnings("ignore", message=r"The image decoding", module=r"torchvision\.")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Images of a task on the device, as they are in the file, and how they are to be shown."""

    rows: list[int]
    """Those of the task's that are here."""
    images: list[torch.Tensor]
    """[H, W, 3] uint8 each, strided."""
    windows: np.ndarray
    """[rows, 2, 6] float32: see ``resample``."""
    flips: np.ndarray
    """[rows] bool."""
    erase: np.ndarray
    """[rows, 4] int64."""
    left: list[int]
    """Rows that the CPU must do."""
    ready: torch.cuda.Event | None
    """On the device: when the images are there."""


class GpuDecoder:
    """Decodes on a CUDA device, in threads of its own."""

    def __init__(self, filler: Filler, device: torch.device, *, exif_rotate: bool) -> None:
        self._filler = filler
        self._device = device
        self._exif_rotate = exif_rotate
        # Its kernels are few and small, and what waits for them is a step ahead of the training's.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="decode-gpu")

    def decode(self, indices: np.ndarray, seeds: np.ndarray) -> Future[Decoded]:
        """Decode some samples.

        Args:
            indices, seeds: [rows] int64.
        """
        return self._pool.submit(self._decode, indices, seeds)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _decode(self, indices: np.ndarray, seeds: np.ndarray) -> Decoded:
        rows, files, left = [], [], []
        for row, index in enumerate(indices.tolist()):
            try:
                data = self._filler.read(index)
            except DecodeError:
                data = b""
            if suits_gpu(data, exif_rotate=self._exif_rotate):
                rows.append(row)
                files.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            else:
                left.append(row)
        images: list[torch.Tensor] = []
        ready = None
        if rows:
            try:
                found, ready = self._on_device(files)
                images = [image.permute(1, 2, 0) for image in found]
            except RuntimeError:
                # One of them is damaged, and it is not said which.
                rows, left = [], list(range(len(indices)))
        windows = np.zeros((len(rows), 2, 6), dtype=np.float32)
        flips = np.zeros(len(rows), dtype=bool)
        erase = np.zeros((len(rows), 4), dtype=np.int64)
        for i, (row, image) in enumerate(zip(rows, images, strict=True)):
            height, width, _ = image.shape
            params = self._filler.draw(int(seeds[row]), width=width, height=height)
            windows[i] = [a.numbers() for a in axes((width, height), params, self._filler.view)]
            if params is not None:
                flips[i], erase[i] = params.flip, params.erase
        return Decoded(rows, images, windows, flips, erase, left, ready)

    def _on_device(self, files: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            found = decode_jpeg(files, mode=ImageReadMode.RGB, device=self._device)
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return found, ready


def share_for_gpu(cpu: float, gpu: float) -> float:
    """Of the JPEGs: so that both are done at once.

    Args:
        cpu, gpu: images per second that each decodes alone.

    Returns:
        0..1, whole percents; 0 where the CPU suffices or the GPU adds next to nothing.
    """
    if cpu >= _ENOUGH:
        return 0.0
    share = _BESIDE_TRAINING * gpu / max(cpu + _BESIDE_TRAINING * gpu, 1.0)
    return round(share, 2) if share >= _LEAST_SHARE else 0.0
