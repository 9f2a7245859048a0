"""From positions of an epoch to batches on the device. Level 2.

Workers decode a bounded number of micro-batches ahead, straight into the memory that is copied to
the device, which may decode a share itself. On a GPU, all that happens to a batch there is queued
by a thread of its own, on a stream of its own, one batch ahead. What a sample looks like depends on
(seed, epoch, sample) alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import TypeVar

import numpy as np
import torch

from lockstep.config.schema import Augment, Data
from lockstep.data.augment import View
from lockstep.data.cache import DeviceCache
from lockstep.data.decode import DecodeError
from lockstep.data.fill import Filler, Placed
from lockstep.data.mixing import box_mask, draw_mixing, is_mixed, mix, pair_bounds
from lockstep.data.nvjpeg import Decoded, GpuDecoder, NvJpegError
from lockstep.data.resample import Target, normalise, resample, to_device
from lockstep.data.sampler import GROUP_BLOCKS, MicroSlice, epoch_order, sample_seeds
from lockstep.data.source import Source
from lockstep.data.workers import Buffer, Filled, make_workers
from lockstep.memory import Recycled

T = TypeVar("T")

_TASK_SAMPLES = 16
"""Samples that a worker takes at once: few enough that closing does not wait long."""
_GPU_SAMPLES = 64
"""What the device is given at once when its pace is measured."""
_PATIENCE_SECONDS = 0.1
"""How often a thread that waits looks whether it shall end."""
_SHARES = 1000
"""Parts in which a share of the samples is measured."""
_DECODER_STREAM = 0x6A706567
"""Of hashes that have nothing to do with those that augment."""


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


@dataclass(slots=True)
class _Pending:
    """A batch that is being filled; m >= n rows, with mixing partners around the slice's."""

    slice: MicroSlice
    positions: np.ndarray
    indices: np.ndarray
    seeds: np.ndarray
    places: np.ndarray
    """[m] int64: the batch's row that each row of the buffer becomes; the workers' come first."""
    buffer: Buffer
    tasks: list[tuple[int, Future[Filled]]]
    """The buffer's row from which a worker fills some."""
    on_device: Future[Decoded] | None
    """The rows that the device decodes: the last of ``places``."""


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
            threads: or processes that decode.

        Raises:
            UserError: ``data.cache=gpu``, and the images do not fit or one cannot be read.
        """
        self.source = source
        self.skipped: dict[str, str] = {}
        """Unreadable samples of this process's slices (``data.on_error=skip``): name, reason."""
        self.wait_seconds = 0.0
        """Time that the consumer of :meth:`batches` waited for images, all in all."""
        self.gpu_share = 0.0
        """Of the JPEGs, which the device decodes: the same ones in every epoch."""
        self._data = data
        self._augment = augment
        self._mixed = augment is not None and is_mixed(augment)
        self._view = View(image_size, data.crop_ratio, data.interpolation)
        self._seed = seed
        self.device = device
        self._layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self._mean = 255 * torch.tensor(data.mean, device=device)
        self._std = 255 * torch.tensor(data.std, device=device)
        training_in_blocks = augment is not None and data.shuffle_block > 1
        self._group = data.shuffle_block * GROUP_BLOCKS if training_in_blocks else 0
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="fetch")
        self._filler = Filler(source, data, augment, self._view)
        kind = "thread" if data.cache == "gpu" else data.worker_kind  # they have nothing to do
        self._workers = make_workers(kind, self._filler, threads, device)
        self._num_workers = threads
        self._gpu_decoder: GpuDecoder | None = None
        self._recycled = Recycled()
        # One for all batches: memory that torch keeps is kept for each stream.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        # Now, when the most memory is free and nobody waits for a step.
        self._cache: DeviceCache | None = None
        if data.cache == "gpu":
            try:
                self._cache = DeviceCache(
                    len(source), self._filler.image, device=device, threads=threads
                )
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End the workers; no batches can be had any more."""
        self._fetcher.shutdown(wait=True, cancel_futures=True)
        self._workers.close()
        if self._gpu_decoder is not None:
            self._gpu_decoder.close()

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

    def prepare_gpu(self) -> str | None:
        """Let the device be able to decode; returns why it is not. Before batches are asked for."""
        if self.device.type != "cuda":
            return "it needs an NVIDIA GPU"
        if self._gpu_decoder is None:
            try:
                self._gpu_decoder = GpuDecoder(
                    self._filler, self.device, exif_rotate=self._data.exif_rotate
                )
            except NvJpegError as error:
                return str(error)
        return None

    def rates(self, seconds: float) -> tuple[float, float]:
        """Measure how fast images are decoded: by the workers alone, and by the device alone.

        Args:
            seconds: for each, about; the device must be prepared.

        Returns:
            images per second of the files that it can decode; 0 where there are none.
        """
        assert self._gpu_decoder is not None
        decoder = self._gpu_decoder
        order = epoch_order(self._seed, 0, len(self))
        seeds = sample_seeds(self._seed, 0, order)
        depth = 4 * self._num_workers
        shape = (_TASK_SAMPLES, self._view.size, self._view.size, 3)
        buffers = [self._workers.buffer(shape) for _ in range(depth + 1)]

        def by_workers(task: int) -> Future[Filled]:
            part = slice(task * _TASK_SAMPLES, (task + 1) * _TASK_SAMPLES)
            rows = range(len(order[part]))
            return self._workers.fill(buffers[task % len(buffers)], rows, order[part], seeds[part])

        def by_device(task: int) -> Future[Decoded]:
            part = slice(task * _GPU_SAMPLES, (task + 1) * _GPU_SAMPLES)
            return decoder.decode(order[part], seeds[part])

        try:
            tasks = -(-len(order) // _TASK_SAMPLES)
            cpu = _pace(by_workers, lambda filled: len(filled.erase), tasks, depth, seconds)
        finally:
            self._workers.drain()
            for buffer in buffers:
                self._workers.give_back(buffer)
        tasks = -(-len(order) // _GPU_SAMPLES)
        gpu = _pace(by_device, lambda decoded: len(decoded.rows), tasks, 4, seconds)
        torch.cuda.empty_cache()  # whole images, many of them
        return cpu, gpu

    def batches(self, epoch: int, slices: Iterable[MicroSlice]) -> Generator[Batch, None, None]:
        """One batch per slice, in order; an empty slice gives one real sample of weight 0.

        One iteration at a time. Closing the generator, or an exception in it, leaves no work behind.
        At most ``data.prefetch`` batches lie ready beside the one that is used; on a GPU, two more.

        Raises:
            UserError: an image cannot be read and ``data.on_error`` is ``stop``.
        """
        stream = self._prepared(epoch, slices)
        if self._stream is not None:
            stream = _one_ahead(stream, self._stream)
        try:
            while True:
                began = time.perf_counter()
                batch = next(stream, None)
                self.wait_seconds += time.perf_counter() - began
                if batch is None:
                    return
                yield batch
                del batch  # or the memory of two would be held while the next one comes
        finally:
            stream.close()

    def _prepared(self, epoch: int, slices: Iterable[MicroSlice]) -> Generator[Batch, None, None]:
        order = np.arange(len(self), dtype=np.int64)
        if self._augment is not None:
            order = epoch_order(self._seed, epoch, len(self), block=self._data.shuffle_block)
        pending: deque[_Pending] = deque()
        try:
            fetched = 0
            for piece in slices:
                # A group ahead of what is shuffled together: its blocks are read as a whole.
                while self._group and fetched <= piece.stop + self._group and fetched < len(order):
                    part = order[max(fetched, piece.start) : fetched + self._group]
                    self._fetcher.submit(self.source.will_read, part)
                    fetched += self._group
                self._submit(epoch, order, piece, pending)
                if len(pending) > self._data.prefetch:
                    yield self._next(epoch, pending)
            while pending:
                yield self._next(epoch, pending)
        finally:
            self._workers.drain()
            for batch in pending:
                if batch.on_device is not None and not batch.on_device.cancel():
                    batch.on_device.exception()
                self._workers.give_back(batch.buffer)

    def _next(self, epoch: int, pending: deque[_Pending]) -> Batch:
        """The first of the pending; what fails stays, to be cleared away."""
        batch = self._finish(epoch, pending[0])
        self._workers.give_back(pending.popleft().buffer)
        return batch

    def _submit(
        self, epoch: int, order: np.ndarray, piece: MicroSlice, pending: deque[_Pending]
    ) -> None:
        assert 0 <= piece.start <= piece.stop <= len(order), piece
        if piece.start == piece.stop:
            first = piece.start % len(order)
            positions = np.array([first], dtype=np.int64)
        elif self._mixed:
            positions = np.arange(*pair_bounds(piece.start, piece.stop, len(order)))
        else:
            positions = np.arange(piece.start, piece.stop)
        indices, size = order[positions], self._view.size
        seeds = sample_seeds(self._seed, epoch, indices)
        takes = np.zeros(len(indices), dtype=bool)
        if self._cache is None and self.gpu_share:
            takes = device_takes(indices, self.gpu_share)
        places = np.argsort(takes, kind="stable")
        split = len(indices) - int(takes.sum())
        shape = (0 if self._cache else len(positions), size, size, 3)
        batch = _Pending(
            piece, positions, indices, seeds, places, self._workers.buffer(shape), [], None
        )
        pending.append(batch)
        if split < len(indices):
            rows = places[split:]
            assert self._gpu_decoder is not None, "prepare_gpu comes first"
            batch.on_device = self._gpu_decoder.decode(indices[rows], seeds[rows])
        if self._cache is None:
            for first in range(0, split, _TASK_SAMPLES):
                self._fill(batch, range(first, min(first + _TASK_SAMPLES, split)))

    def _fill(self, batch: _Pending, rows: range) -> None:
        """Let a worker fill some rows of the buffer."""
        of = batch.places[rows.start : rows.stop]
        task = self._workers.fill(batch.buffer, rows, batch.indices[of], batch.seeds[of])
        batch.tasks.append((rows.start, task))

    def _finish(self, epoch: int, batch: _Pending) -> Batch:
        """Wait for a batch's tasks and take it to the device."""
        decoded = batch.on_device.result() if batch.on_device is not None else None
        split = len(batch.places) - (
            0 if decoded is None else len(decoded.rows) + len(decoded.left)
        )
        for row in decoded.left if decoded is not None else ():
            self._fill(batch, range(split + row, split + row + 1))
        erase = np.zeros((len(batch.places), 4), dtype=np.int64)
        reasons: dict[int, str] = {}
        for first, task in batch.tasks:
            filled = task.result()
            erase[batch.places[first : first + len(filled.erase)]] = filled.erase
            reasons |= {int(batch.places[first + r]): why for r, why in filled.reasons.items()}

        size = self._view.size
        shape = (len(batch.places), 3, size, size)
        if self.device.type == "cpu":
            images = self._recycled.empty(shape)
        else:
            images = torch.empty(shape, device=self.device, memory_format=self._layout)
        target = Target(images, self._mean, self._std)
        if self._cache is not None:
            self._show_cached(batch, self._cache, target, erase, reasons)
        else:
            # The workers' rows, and where they had to help the device, the whole.
            rows = len(batch.places) if decoded is not None and decoded.left else split
            pixels = self._to_device(batch.buffer.pixels[:rows])
            normalise(pixels, target=target, places=batch.places[:rows])
        if self.device.type == "cuda":
            batch.buffer.copied = torch.cuda.Event(blocking=True)
            batch.buffer.copied.record()
        if decoded is not None:
            self._show_decoded(decoded, batch.places[split:], target, erase)
        if erase.any():
            boxes = self._to_device(torch.from_numpy(erase))
            images.masked_fill_(box_mask(boxes, size), 0.0)
        targets = self._to_device(torch.from_numpy(self.source.targets[batch.indices]))
        usable = np.ones(len(batch.indices), dtype=bool)
        usable[list(reasons)] = False
        if self._mixed:
            assert self._augment is not None
            how = draw_mixing(self._augment, self._seed, epoch, batch.positions, usable, size)
            images, targets = mix(
                images,
                targets,
                len(self.source.classes),
                partner=self._to_device(torch.from_numpy(how.partner)),
                blend=self._to_device(torch.from_numpy(how.blend)),
                box=self._to_device(torch.from_numpy(how.box)),
                share=self._to_device(torch.from_numpy(how.share)),
            )
        return self._own_part(batch, images, targets, usable, reasons)

    def _show_cached(
        self,
        batch: _Pending,
        cache: DeviceCache,
        target: Target,
        erase: np.ndarray,
        reasons: dict[int, str],
    ) -> None:
        """Crop what the device holds decoded; fills ``erase`` and ``reasons`` as a worker does."""
        placed = []
        for row, (index, seed) in enumerate(
            zip(batch.indices.tolist(), batch.seeds.tolist(), strict=True)
        ):
            if index in cache.reasons:
                reasons[row] = self._filler.refused(index, DecodeError(cache.reasons[index]))
            height, width, _ = cache[index].shape
            placed.append(self._filler.place(seed, width=width, height=height))
        where = Placed.joined(placed)
        resample(
            [cache[index] for index in batch.indices.tolist()],
            where.windows,
            where.flips,
            interpolation=self._view.interpolation,
            target=target,
            places=np.arange(len(batch.indices)),
        )
        erase[:] = where.erase

    def _show_decoded(
        self, decoded: Decoded, places: np.ndarray, target: Target, erase: np.ndarray
    ) -> None:
        """Crop what the device has decoded."""
        resample(
            decoded.images,
            decoded.placed.windows,
            decoded.placed.flips,
            interpolation=self._view.interpolation,
            target=target,
            places=places[decoded.rows],
        )
        for image in decoded.images if self.device.type == "cuda" else ():
            image.record_stream(torch.cuda.current_stream(self.device))
        erase[places[decoded.rows]] = decoded.placed.erase

    def _own_part(
        self,
        batch: _Pending,
        images: torch.Tensor,
        targets: torch.Tensor,
        usable: np.ndarray,
        reasons: dict[int, str],
    ) -> Batch:
        """Without the partners beyond the slice's ends; a dummy's sample counts nothing."""
        first = int(batch.positions[0])
        dummy = batch.slice.start == batch.slice.stop
        own = slice(0, 1) if dummy else slice(batch.slice.start - first, batch.slice.stop - first)
        counts = np.zeros(1, dtype=bool) if dummy else usable[own]
        if not dummy:
            for row, reason in reasons.items():
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
        return to_device(tensor, self.device)


def device_takes(indices: np.ndarray, share: float) -> np.ndarray:
    """Which samples the device decodes: the same ones always, whoever asks.

    Two decoders may differ, so it must not depend on who is faster just now.
    """
    return sample_seeds(0, 0, indices, stream=_DECODER_STREAM) % _SHARES < round(share * _SHARES)


def _pace(
    begin: Callable[[int], Future[T]],
    count: Callable[[T], int],
    tasks: int,
    depth: int,
    seconds: float,
) -> float:
    """Images per second of tasks, ``depth`` of them at once, behind the first one's end."""
    open_tasks: deque[Future[T]] = deque()
    images, began, stop = -1, 0.0, 0.0
    for task in range(tasks + depth):
        late = images >= 0 and stop - began > seconds
        if task < tasks and not late:
            open_tasks.append(begin(task))
            if len(open_tasks) < depth:
                continue
        if not open_tasks:
            break
        done = count(open_tasks.popleft().result())
        stop = time.perf_counter()
        if images < 0:
            images, began = 0, stop
        else:
            images += done
    return max(images, 0) / max(stop - began, 1e-9)


def _one_ahead(
    batches: Generator[Batch, None, None], stream: torch.cuda.Stream
) -> Generator[Batch, None, None]:
    """The same batches, prepared by a thread on ``stream`` while one is used."""
    ready: Queue[tuple[Batch, torch.cuda.Event] | BaseException | None] = Queue(maxsize=1)
    ended = threading.Event()
    device = stream.device

    def put(item: tuple[Batch, torch.cuda.Event] | BaseException | None) -> None:
        while not ended.is_set():
            try:
                ready.put(item, timeout=_PATIENCE_SECONDS)
            except Full:
                continue
            return

    def prepare() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                for batch in batches:
                    there = torch.cuda.Event()
                    there.record(stream)
                    put((batch, there))
                    del batch  # it is the consumer's now
                    if ended.is_set():
                        return
            put(None)
        except BaseException as error:  # noqa: BLE001 - the consumer raises it
            put(error)
        finally:
            batches.close()

    thread = threading.Thread(target=prepare, name="prepare", daemon=True)
    thread.start()
    try:
        while True:
            try:
                item = ready.get(timeout=1.0)
            except Empty:
                assert thread.is_alive() or not ready.empty(), "the preparing thread is gone"
                continue
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            batch, there = item
            current = torch.cuda.current_stream(device)
            current.wait_event(there)
            for tensor in (batch.images, batch.targets, batch.weights, batch.seeds):
                tensor.record_stream(current)
            yield batch
            del item, batch  # or the memory of two would be held
    finally:
        ended.set()
        thread.join()
