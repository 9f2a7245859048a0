"""JPEGs decoded by the GPU's own engines, beside the training. Level 2.

NVIDIA's nvJPEG, called directly: torchvision's way to it starts anew for every number of images,
which waits for all that the GPU has to do, and cannot be told that its kernels come first. Needs a
GPU with JPEG engines (A100, H100, H200, L4 and later ones). What they are not made for, and every
batch that they refuse, the CPU decodes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
import torchvision

from lockstep.data.decode import DecodeError, size_for_gpu
from lockstep.data.fill import Filler, Placed

_THREADS = 3
"""Some read files while another waits for the engines."""
_STEP = 16
"""Batches are filled up to a multiple of it: each size has memory of its own."""
_ALIGN_BYTES = 256
_HARDWARE, _RGB_INTERLEAVED = 3, 5
"""Of nvjpeg.h: nvjpegBackend_t, nvjpegOutputFormat_t."""

_BESIDE_TRAINING = 0.5
"""What is left of the engines' pace beside training and busy cores, as measured on an H200."""
_LEAST_SHARE = 1 / 3
"""Less does not pay: feeding the engines takes from the cores, and from the training's launches."""
_MOST_SHARE = 1 / 2
"""More does not either: the engines do better with cores that only feed them. An H200 beside four
workers trained on 2,525 images/s with 58 %, on 3,322 with all (docs/results/feed_gpu.md)."""


class NvJpegError(Exception):
    """The library is absent or refuses something; the message says what."""


class _Image(ctypes.Structure):
    """nvjpegImage_t: where the pixels shall go."""

    _fields_ = (("channel", c_void_p * 4), ("pitch", c_size_t * 4))


class NvJpeg:
    """One decoder of a thread, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Raises NvJpegError: no library, or no engines."""
        self._device = device
        self._handle = c_void_p()
        self._states: dict[int, c_void_p] = {}
        self._library = _load()
        with torch.cuda.device(device):
            # Its kernels are few and small, and what waits for them is a step ahead of the training.
            self._stream = torch.cuda.Stream(device, priority=-5)
            self._call("nvjpegCreateEx", _HARDWARE, None, None, c_uint(0), byref(self._handle))
        engines, cores = c_uint(), c_uint()
        self._call("nvjpegGetHardwareDecoderInfo", self._handle, byref(engines), byref(cores))
        if engines.value == 0:
            raise NvJpegError("this GPU has no JPEG engines")

    def __del__(self) -> None:
        for state in self._states.values():
            self._library.nvjpegJpegStateDestroy(state)
        if self._handle:
            self._library.nvjpegDestroy(self._handle)

    def decode(self, files: list[bytes], sizes: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Decode; returns when the pixels are there.

        Args:
            files: baseline JPEGs of three components.
            sizes: height and width of each.

        Returns:
            [H, W, 3] uint8 each, on the device.

        Raises:
            NvJpegError: one of them is refused; it is not said which.
        """
        starts = np.cumsum([0, *(-(-3 * h * w // _ALIGN_BYTES) * _ALIGN_BYTES for h, w in sizes)])
        count = -(-len(files) // _STEP) * _STEP
        # Filled up with the smallest, whose pixels go to its own place again.
        least = min(range(len(files)), key=lambda i: len(files[i]))
        order = [*range(len(files)), *[least] * (count - len(files))]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            pixels = torch.empty(int(starts[-1]), dtype=torch.uint8, device=self._device)
            places = (_Image * count)()
            for place, i in zip(places, order, strict=True):
                place.channel[0] = pixels.data_ptr() + int(starts[i])
                place.pitch[0] = 3 * sizes[i][1]
            self._call(
                "nvjpegDecodeBatched",
                self._handle,
                self._state(count),
                (ctypes.c_char_p * count)(*(files[i] for i in order)),
                (c_size_t * count)(*(len(files[i]) for i in order)),
                places,
                c_void_p(self._stream.cuda_stream),
            )
            self._stream.synchronize()
        return [
            pixels[start : start + 3 * h * w].view(h, w, 3)
            for start, (h, w) in zip(starts[:-1].tolist(), sizes, strict=True)
        ]

    def _state(self, count: int) -> c_void_p:
        state = self._states.get(count)
        if state is None:
            state = c_void_p()
            self._call("nvjpegJpegStateCreate", self._handle, byref(state))
            self._call(
                "nvjpegDecodeBatchedInitialize",
                self._handle,
                state,
                c_int(count),
                c_int(1),
                _RGB_INTERLEAVED,
            )
            self._states[count] = state
        return state

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise NvJpegError(f"{name} answers {status}")


def _load() -> ctypes.CDLL:
    """nvJPEG as torchvision brings it, or NVIDIA's package ``nvidia-nvjpeg``."""
    site = Path(torchvision.__file__).parents[1]
    found = [*site.glob("torchvision.libs/libnvjpeg*"), *site.glob("nvidia/*/lib/libnvjpeg.so*")]
    for path in found:
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise NvJpegError("libnvjpeg is not there: pip install nvidia-nvjpeg")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Images of a task on the device, as they are in the file, and how they are to be shown."""

    rows: list[int]
    """Those of the task's that are here."""
    images: list[torch.Tensor]
    """[H, W, 3] uint8 each."""
    placed: Placed
    left: list[int]
    """Rows that the CPU must do."""


class GpuDecoder:
    """Decodes on a CUDA device, in threads of its own."""

    def __init__(self, filler: Filler, device: torch.device, *, exif_rotate: bool) -> None:
        """Raises NvJpegError: see :class:`NvJpeg`."""
        self._filler = filler
        self._exif_rotate = exif_rotate
        self._idle: SimpleQueue[NvJpeg] = SimpleQueue()
        for _ in range(_THREADS):
            self._idle.put(NvJpeg(device))
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
        rows, files, sizes, left = [], [], [], []
        for row, index in enumerate(indices.tolist()):
            try:
                data = self._filler.read(index)
            except DecodeError:
                data = b""
            size = size_for_gpu(data, exif_rotate=self._exif_rotate)
            if size is None:
                left.append(row)
            else:
                rows.append(row)
                files.append(data)
                sizes.append(size)
        found = self._images(files, sizes)
        images = [image for image in found if image is not None]
        left += [row for row, image in zip(rows, found, strict=True) if image is None]
        rows = [row for row, image in zip(rows, found, strict=True) if image is not None]
        placed = [
            self._filler.place(int(seeds[row]), height=image.shape[0], width=image.shape[1])
            for row, image in zip(rows, images, strict=True)
        ]
        return Decoded(rows, images, Placed.joined(placed), sorted(left))

    def _images(
        self, files: list[bytes], sizes: list[tuple[int, int]]
    ) -> Sequence[torch.Tensor | None]:
        """None for what is refused: who is decoded must not depend on whom it came with."""
        if not files:
            return []
        decoder = self._idle.get()
        try:
            return decoder.decode(files, sizes)
        except NvJpegError:
            if len(files) == 1:
                return [None]
        finally:
            self._idle.put(decoder)
        return [
            image
            for file, size in zip(files, sizes, strict=True)
            for image in self._images([file], [size])
        ]


def share_for_gpu(cpu: float, gpu: float) -> float:
    """Of the JPEGs: so that both are done at once, or all where the CPU would do the smaller part.

    Args:
        cpu, gpu: images per second that each decodes alone.

    Returns:
        0..1, whole percents; 0 where the GPU adds less than it takes.
    """
    share = _BESIDE_TRAINING * gpu / max(cpu + _BESIDE_TRAINING * gpu, 1.0)
    if share > _MOST_SHARE:
        return 1.0
    return round(share, 2) if share >= _LEAST_SHARE else 0.0
