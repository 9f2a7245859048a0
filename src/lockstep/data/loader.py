"""From positions of an epoch to batches on the device. Level 2.

Threads of this process decode (decoders leave Python's lock while they work), a bounded number of
micro-batches ahead, straight into the buffer that is copied to the device. What a sample looks like
depends on (seed, epoch, sample) alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.config.schema import Augment, Data
from lockstep.data.augment import View, apply, axes, draw, eval_image
from lockstep.data.cache import DeviceCache, RamCache
from lockstep.data.decode import DecodeError, decode
from lockstep.data.mixing import box_mask, draw_mixing, is_mixed, mix, pair_bounds
from lockstep.data.resample import resample, to_device
from lockstep.data.sampler import MicroSlice, epoch_order, sample_seeds
from lockstep.data.source import Source
from lockstep.errors import UserError

_TASK_SAMPLES = 16
"""Samples that a thread takes at once: few enough that closing does not wait long."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass of n samples; tensors on the device."""

    images: torch.Tensor
    """[n, 3, S, S] float32, normalised; channels last on CUDA."""
    targets: torch.Tensor
    """[n] int64, or [n, classes] float32 when samples are mixed."""
    weights: torch.Tensor
    """[n] float32: 1, or 0 for a sample that does not count (dummy, unreadable)."""
    seeds: torch.Tensor
    """[n] int64: each sample's own seed."""
    seeds_host: np.ndarray
    """The same on the host."""
    ids: np.ndarray
    """[<= n] int64: indices of the samples that count."""
    slice: MicroSlice


@dataclass(frozen=True, slots=True)
class _Pending:
    """A batch that threads are filling; m >= n rows, with mixing partners around the slice's."""

    slice: MicroSlice
    positions: np.ndarray
    indices: np.ndarray
    seeds: np.ndarray
    pixels: torch.Tensor
    """[m, S, S, 3] uint8, pinned for CUDA; m = 0 where the device has the images."""
    windows: np.ndarray
    """[m, 2, 6] float32, for images that the device has: see ``resample``."""
    flips: np.ndarray
    """[m] bool, for the same."""
    erase: np.ndarray
    reasons: dict[int, str]
    """Why a row could not be read."""
    tasks: list[Future[None]]


class Loader:
    """Batches of one split."""

    def __init__(
        self,
        source: Source,
        data: Data,
        augment: Augment | None,
        *,
        image_size: int,
        seed: int,
        device: torch.device,
        threads: int,
    ) -> None:
        """
        Args:
            augment: None for evaluation: in the source's own order, the evaluation crop.
            image_size: side S of the images, pixels.
            seed: of the run.
            threads: that decode.

        Raises:
            UserError: ``data.cache=gpu``, and the images do not fit or one cannot be read.
        """
        self.source = source
        self.skipped: dict[str, str] = {}
        """Unreadable samples of this process's slices (``data.on_error=skip``): name, reason."""
        self.wait_seconds = 0.0
        """Time that the consumer of :meth:`batches` waited for images, all in all."""
        self._data = data
        self._augment = augment
        self._mixed = augment is not None and is_mixed(augment)
        self._view = View(image_size, data.crop_ratio, data.interpolation)
        self._seed = seed
        self._device = device
        self._threads = threads
        self._layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self._mean = 255 * torch.tensor(data.mean, device=device).view(1, 3, 1, 1)
        self._std = 255 * torch.tensor(data.std, device=device).view(1, 3, 1, 1)
        self._cache = RamCache(data.cache)
        # Now, when the most memory is free and nobody waits for a step.
        self._on_device: DeviceCache | None = None
        if data.cache == "gpu":
            self._on_device = DeviceCache(len(source), self._image, device=device, threads=threads)

    def __len__(self) -> int:
        return len(self.source)

    @property
    def stops_on_error(self) -> bool:
        """Whether an unreadable image ends the run."""
        return self._data.on_error == "stop"

    @property
    def num_left_out(self) -> int:
        """Samples of this process's slices that could not be read so far."""
        return len(self.skipped)

    def batches(self, epoch: int, slices: Iterable[MicroSlice]) -> Generator[Batch, None, None]:
        """One batch per slice, in order; an empty slice gives one real sample of weight 0.

        Closing the generator, or an exception in it, ends its threads. At most ``data.prefetch``
        batches lie ready beside the one that is used.

        Raises:
            UserError: an image cannot be read and ``data.on_error`` is ``stop``.
        """
        order = np.arange(len(self), dtype=np.int64)
        if self._augment is not None:
            order = epoch_order(self._seed, epoch, len(self))
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="decode")
        pending: deque[_Pending] = deque()
        try:
            for piece in slices:
                pending.append(self._submit(pool, epoch, order, piece))
                if len(pending) > self._data.prefetch:
                    yield self._finish(epoch, pending.popleft())
            while pending:
                yield self._finish(epoch, pending.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _submit(
        self, pool: ThreadPoolExecutor, epoch: int, order: np.ndarray, piece: MicroSlice
    ) -> _Pending:
        assert 0 <= piece.start <= piece.stop <= len(order), piece
        if piece.start == piece.stop:
            first = piece.start % len(order)
            positions = np.array([first], dtype=np.int64)
        elif self._mixed:
            positions = np.arange(*pair_bounds(piece.start, piece.stop, len(order)))
        else:
            positions = np.arange(piece.start, piece.stop)
        indices, size = order[positions], self._view.size
        shape = (0 if self._on_device else len(positions), size, size, 3)
        batch = _Pending(
            slice=piece,
            positions=positions,
            indices=indices,
            seeds=sample_seeds(self._seed, epoch, indices),
            pixels=torch.empty(shape, dtype=torch.uint8, pin_memory=self._device.type == "cuda"),
            windows=np.zeros((len(positions), 2, 6), dtype=np.float32),
            flips=np.zeros(len(positions), dtype=bool),
            erase=np.zeros((len(positions), 4), dtype=np.int64),
            reasons={},
            tasks=[],
        )
        for first in range(0, len(positions), _TASK_SAMPLES):
            rows = range(first, min(first + _TASK_SAMPLES, len(positions)))
            batch.tasks.append(pool.submit(self._fill, batch, rows))
        return batch

    def _fill(self, batch: _Pending, rows: range) -> None:
        """A thread's task: decode and augment some rows."""
        for row in rows:
            index = int(batch.indices[row])
            try:
                self._fill_row(batch, row, index)
            except DecodeError as error:
                if self.stops_on_error:
                    raise UserError(
                        f"{self.source.path(index)} cannot be read: {error}: repair or remove it, "
                        "or set data.on_error=skip to go on without such images"
                    ) from error
                batch.reasons[row] = str(error)
                if self._on_device is None:
                    batch.pixels[row] = 0

    def _fill_row(self, batch: _Pending, row: int, index: int) -> None:
        if self._on_device is None:
            image = self._image(index)
            height, width, _ = image.shape
        else:
            if index in self._on_device.reasons:
                raise DecodeError(self._on_device.reasons[index])
            height, width, _ = self._on_device[index].shape
        params = None
        if self._augment is not None:
            seed = int(batch.seeds[row])
            params = draw(self._augment, seed, width=width, height=height, size=self._view.size)
            batch.erase[row] = params.erase
        if self._on_device is not None:
            batch.windows[row] = [a.numbers() for a in axes((width, height), params, self._view)]
            batch.flips[row] = params is not None and params.flip
        elif params is None:
            batch.pixels.numpy()[row] = eval_image(image, self._view)
        else:
            batch.pixels.numpy()[row] = apply(image, params, self._view)

    def _image(self, index: int) -> np.ndarray:
        image = self._cache.get(index)
        if image is None:
            try:
                data = self.source.read(index)
            except OSError as error:
                raise DecodeError(error.strerror or str(error)) from error
            image = decode(data, exif_rotate=self._data.exif_rotate)
            self._cache.put(index, image)
        return image

    def _finish(self, epoch: int, batch: _Pending) -> Batch:
        """Wait for a batch's tasks and take it to the device."""
        began = time.perf_counter()
        for task in batch.tasks:
            task.result()
        self.wait_seconds += time.perf_counter() - began

        images = self._normalised(batch)
        if batch.erase.any():
            boxes = self._to_device(torch.from_numpy(batch.erase))
            images.masked_fill_(box_mask(boxes, self._view.size), 0.0)
        targets = self._to_device(torch.from_numpy(self.source.targets[batch.indices]))
        usable = np.ones(len(batch.indices), dtype=bool)
        usable[list(batch.reasons)] = False
        if self._mixed:
            assert self._augment is not None
            how = draw_mixing(
                self._augment, self._seed, epoch, batch.positions, usable, self._view.size
            )
            images, targets = mix(
                images,
                targets,
                len(self.source.classes),
                partner=self._to_device(torch.from_numpy(how.partner)),
                blend=self._to_device(torch.from_numpy(how.blend)),
                box=self._to_device(torch.from_numpy(how.box)),
                share=self._to_device(torch.from_numpy(how.share)),
            )
        return self._own_part(batch, images, targets, usable)

    def _normalised(self, batch: _Pending) -> torch.Tensor:
        """[m, 3, S, S] float32."""
        if self._on_device is not None:
            images = resample(
                [self._on_device[int(index)] for index in batch.indices],
                batch.windows,
                batch.flips,
                size=self._view.size,
                interpolation=self._view.interpolation,
                mean=self._mean.flatten(),
                std=self._std.flatten(),
            )
            return images.contiguous(memory_format=self._layout)
        images = self._to_device(batch.pixels).permute(0, 3, 1, 2)
        images = images.to(torch.float32, memory_format=self._layout)
        return images.sub_(self._mean).div_(self._std)

    def _own_part(
        self, batch: _Pending, images: torch.Tensor, targets: torch.Tensor, usable: np.ndarray
    ) -> Batch:
        """Without the partners beyond the slice's ends; a dummy's sample counts nothing."""
        first = int(batch.positions[0])
        dummy = batch.slice.start == batch.slice.stop
        own = slice(0, 1) if dummy else slice(batch.slice.start - first, batch.slice.stop - first)
        counts = np.zeros(1, dtype=bool) if dummy else usable[own]
        if not dummy:
            for row, reason in batch.reasons.items():
                if own.start <= row < own.stop:
                    self.skipped[self.source.name(int(batch.indices[row]))] = reason
        seeds = batch.seeds[own]
        return Batch(
            images=images[own].contiguous(memory_format=self._layout),
            targets=targets[own],
            weights=self._to_device(torch.from_numpy(counts.astype(np.float32))),
            seeds=self._to_device(torch.from_numpy(seeds)),
            seeds_host=seeds,
            ids=batch.indices[own][counts],
            slice=batch.slice,
        )

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self._device)
