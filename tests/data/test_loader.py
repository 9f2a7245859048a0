from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import decode_jpeg

from lockstep.config.schema import Augment, Data
from lockstep.data import cache as cache_module
from lockstep.data import fill as fill_module
from lockstep.data import loader as loader_module
from lockstep.data import nvjpeg as nvjpeg_module
from lockstep.data import sampler as sampler_module
from lockstep.data.augment import View, eval_image
from lockstep.data.loader import Batch, Loader, device_takes
from lockstep.data.nvjpeg import Decoded, GpuDecoder, NvJpegError
from lockstep.data.sampler import MicroSlice, epoch_order, sample_seeds, window_slices
from lockstep.data.source import FolderSource
from lockstep.data.workers import WorkerLostError
from lockstep.errors import UserError

SIZE = 16
ALL = {
    "crop": "random_resized",
    "hflip": 0.5,
    "policy": "randaugment",
    "erasing": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
}


@pytest.fixture
def make(
    image_root: Path, data_config: Callable[..., Data], augment_config: Callable[..., Augment]
) -> Callable[..., Loader]:
    """A loader on the CPU; ``augment=None`` is evaluation, else what it changes."""

    def build(
        augment: dict[str, Any] | None = None,
        *,
        root: Path = image_root,
        split: str = "train",
        seed: int = 3,
        threads: int = 2,
        **data: Any,
    ) -> Loader:
        return Loader(
            FolderSource.open(root, split),
            data_config(**data),
            None if augment is None else augment_config(**augment),
            image_size=SIZE,
            seed=seed,
            device=torch.device("cpu"),
            threads=threads,
        )

    return build


def by_position(loader: Loader, epoch: int, slices: Iterable[MicroSlice]) -> dict[int, Any]:
    """(image, target, seed, id) of each position."""
    found: dict[int, Any] = {}
    for batch in loader.batches(epoch, slices):
        if batch.slice.start == batch.slice.stop:
            assert len(batch.ids) == 0 and batch.weights.tolist() == [0.0]
            continue
        rows = range(batch.slice.start, batch.slice.stop)
        assert batch.weights.tolist() == [1.0] * len(rows)
        for row, position in enumerate(rows):
            assert position not in found
            found[position] = (
                batch.images[row],
                batch.targets[row],
                int(batch.seeds[row]),
                int(batch.ids[row]),
            )
    return found


def whole_epoch(
    loader: Loader, *, window: int, micro: int | None, world: int, epoch: int = 1
) -> dict[int, Any]:
    """What all ranks together take in one epoch."""
    found: dict[int, Any] = {}
    for rank in range(world):
        slices = [
            piece
            for start in range(0, len(loader), window)
            for piece in window_slices(start, min(start + window, len(loader)), micro, rank, world)
        ]
        mine = by_position(loader, epoch, slices)
        assert not found.keys() & mine.keys()
        found |= mine
    return found


@pytest.mark.parametrize("augment", [ALL, ALL | {"mixup": 0.0, "cutmix": 0.0}], ids=["mix", "own"])
@pytest.mark.parametrize(
    ("window", "micro", "world", "threads"),
    [
        pytest.param(8, None, 1, 1, id="one thread"),
        pytest.param(8, None, 2, 3, id="two processes"),
        pytest.param(8, None, 3, 2, id="three processes"),
        pytest.param(7, 3, 4, 2, id="odd everything"),
        pytest.param(23, 1, 2, 2, id="micro-batches of one"),
    ],
)
def test_a_sample_is_the_same_however_the_work_is_shared(
    make: Callable[..., Loader],
    augment: dict[str, Any],
    window: int,
    micro: int | None,
    world: int,
    threads: int,
) -> None:
    expected = whole_epoch(make(augment), window=23, micro=None, world=1)
    assert sorted(expected) == list(range(23))
    assert sorted(e[3] for e in expected.values()) == list(range(23))
    got = whole_epoch(make(augment, threads=threads), window=window, micro=micro, world=world)
    assert sorted(got) == sorted(expected)
    for position, (image, target, seed, index) in expected.items():
        other = got[position]
        assert (other[2], other[3]) == (seed, index)
        torch.testing.assert_close(other[0], image, rtol=0, atol=1e-6)
        torch.testing.assert_close(other[1], target, rtol=0, atol=1e-6)


def test_starting_in_the_middle_of_an_epoch(make: Callable[..., Loader]) -> None:
    expected = by_position(make(ALL), 2, [MicroSlice(0, 23, 0)])
    for position, found in by_position(make(ALL), 2, [MicroSlice(9, 14, 0)]).items():
        torch.testing.assert_close(found[0], expected[position][0])


def test_training_order_and_seeds_are_the_samplers(make: Callable[..., Loader]) -> None:
    (batch,) = make({}).batches(4, [MicroSlice(2, 9, 0)])
    np.testing.assert_array_equal(batch.ids, epoch_order(3, 4, 23)[2:9])
    np.testing.assert_array_equal(batch.seeds_host, sample_seeds(3, 4, batch.ids))
    np.testing.assert_array_equal(batch.seeds, batch.seeds_host)


def test_blocks_are_fetched_before_they_are_read(
    make: Callable[..., Loader], monkeypatch: Any
) -> None:
    monkeypatch.setattr(sampler_module, "GROUP_BLOCKS", 2)
    monkeypatch.setattr(loader_module, "GROUP_BLOCKS", 2)
    told: list[int] = []
    monkeypatch.setattr(FolderSource, "will_read", lambda _, i: told.extend(i.tolist()))
    loader = make({}, shuffle_block=3)
    seen: list[int] = []
    for batch in loader.batches(1, window_slices(0, 23, 4, 0, 1)):
        seen += batch.ids.tolist()
        assert set(seen) <= set(told)
    assert seen == told == epoch_order(3, 1, 23, block=3).tolist()
    assert seen != epoch_order(3, 1, 23).tolist()
    told.clear()
    list(loader.batches(1, [MicroSlice(14, 23, 0)]))  # resumed: what lies behind is not fetched
    assert told == seen[14:]
    loader.close()


def test_epochs_and_seeds_differ(make: Callable[..., Loader]) -> None:
    def first(epoch: int, seed: int) -> torch.Tensor:
        return next(make(ALL, seed=seed).batches(epoch, [MicroSlice(0, 4, 0)])).images

    assert not torch.equal(first(0, 0), first(1, 0))
    assert not torch.equal(first(0, 0), first(0, 1))


def test_evaluation_is_in_order_and_normalised(make: Callable[..., Loader]) -> None:
    loader = make(None, split="val")
    (batch,) = loader.batches(0, [MicroSlice(0, 7, 0)])
    assert batch.ids.tolist() == list(range(7))
    assert batch.targets.tolist() == loader.source.targets.tolist()
    assert batch.images.dtype == torch.float32 and batch.images.is_contiguous()
    for row in range(7):
        image = Image.open(loader.source.path(row))
        pixels = torch.from_numpy(eval_image(np.array(image), View(SIZE, 0.875, "bilinear")))
        mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.25, 0.2, 0.1])
        expected = ((pixels / 255 - mean) / std).permute(2, 0, 1)
        torch.testing.assert_close(batch.images[row], expected, rtol=1e-5, atol=1e-5)


def test_erased_rectangle_is_the_mean(make: Callable[..., Loader]) -> None:
    plain = by_position(make({}), 0, [MicroSlice(0, 23, 0)])
    erased = by_position(make({"erasing": 1.0}), 0, [MicroSlice(0, 23, 0)])
    for position, (image, *_) in erased.items():
        changed = image != plain[position][0]
        assert changed.any() and (image[changed] == 0).all()


@pytest.mark.parametrize("mixed", [False, True], ids=["hard", "soft"])
def test_empty_slice_is_one_real_sample_that_does_not_count(
    make: Callable[..., Loader], mixed: bool
) -> None:
    augment = {"mixup": 1.0} if mixed else {}
    for start in (0, 5, 23):
        (batch,) = make(augment).batches(0, [MicroSlice(start, start, 7)])
        assert batch.images.shape == (1, 3, SIZE, SIZE) and batch.images.abs().sum() > 0
        assert batch.weights.tolist() == [0.0] and batch.ids.shape == (0,)
        assert batch.targets.shape == ((1, 3) if mixed else (1,))
        assert batch.seeds.shape == (1,) and batch.seeds_host.shape == (1,)


@pytest.fixture
def damaged(image_root: Path, tmp_path: Path) -> Path:
    """A text and a dangling link among the training images."""
    root = shutil.copytree(image_root, tmp_path / "damaged")
    (root / "train/class0/00.png").write_text("no image")
    (root / "train/class1/01.png").unlink()
    (root / "train/class1/01.png").symlink_to("nowhere.png")
    return root


@pytest.mark.parametrize("augment", [None, {}, ALL], ids=["eval", "train", "mix"])
def test_unreadable_stops_by_name(
    make: Callable[..., Loader], damaged: Path, augment: dict[str, Any] | None
) -> None:
    loader = make(augment, root=damaged)
    with pytest.raises(UserError) as caught:
        list(loader.batches(0, [MicroSlice(0, 23, 0)]))
    message = str(caught.value)
    assert "not an image" in message or "No such file" in message
    assert str(damaged / "train/class") in message and "data.on_error=skip" in message
    assert loader.stops_on_error


@pytest.mark.parametrize("augment", [None, {}, ALL], ids=["eval", "train", "mix"])
def test_unreadable_is_skipped_and_named(
    make: Callable[..., Loader], damaged: Path, augment: dict[str, Any] | None
) -> None:
    loader = make(augment, root=damaged, on_error="skip")
    for epoch in range(2):
        counted: list[int] = []
        for batch in loader.batches(epoch, window_slices(0, 23, 4, 0, 1)):
            counted += batch.ids.tolist()
            assert int(batch.weights.sum()) == len(batch.ids)
            assert torch.isfinite(batch.images).all()
        bad = {loader.source.name(i) for i in set(range(23)) - set(counted)}
        assert bad == {"class0/00.png", "class1/01.png"} and len(counted) == 21
    assert loader.skipped == {
        "class0/00.png": "not an image of a known format",
        "class1/01.png": "No such file or directory",
    }
    assert loader.num_left_out == 2 and not loader.stops_on_error


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("gone", ["", "train"], ids=["all", "one split"])
def test_images_that_are_gone_altogether_are_not_left_out(
    make: Callable[..., Loader], damaged: Path, on_error: str, gone: str
) -> None:
    loader = make({}, root=damaged, on_error=on_error)
    shutil.rmtree(damaged / gone)
    with pytest.raises(
        UserError, match=r"is gone: bring it back .*goes on from the newest"
    ) as told:
        list(loader.batches(0, [MicroSlice(0, 23, 0)]))
    assert f"data.root = {damaged}: {damaged / gone} is gone" in str(told.value)


def test_each_unreadable_is_left_out_by_one_process(
    make: Callable[..., Loader], damaged: Path
) -> None:
    """Not by its mixing partner's process, nor by one that runs it as a dummy."""
    left_out: list[str] = []
    for rank in range(5):
        loader = make(ALL, root=damaged, on_error="skip")
        list(loader.batches(0, window_slices(0, 23, 1, rank, 5)))
        left_out += loader.skipped
    assert sorted(left_out) == ["class0/00.png", "class1/01.png"]


def test_file_that_vanishes_during_the_run(
    make: Callable[..., Loader], image_root: Path, tmp_path: Path
) -> None:
    root = shutil.copytree(image_root, tmp_path / "vanishing")
    loader = make(None, root=root, prefetch=1)
    stream = loader.batches(0, window_slices(0, 23, 2, 0, 1))
    next(stream)
    shutil.rmtree(root / "train/class2")
    with pytest.raises(UserError, match="No such file"):
        list(stream)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_small_set_is_read_once(
    make: Callable[..., Loader], monkeypatch: Any, tmp_path: Path, kind: str
) -> None:
    read = FolderSource.read

    def counted(self: FolderSource, index: int) -> bytes:
        with (tmp_path / "reads").open("a") as file:
            file.write(f"{index}\n")
        return read(self, index)

    monkeypatch.setattr(FolderSource, "read", counted)
    loader = make({}, worker_kind=kind)
    for epoch in range(3):
        list(loader.batches(epoch, window_slices(0, 23, 5, 0, 1)))
    loader.close()
    reads = (tmp_path / "reads").read_text().split()
    assert sorted(map(int, reads)) == list(range(23))


@pytest.mark.parametrize("kind", ["auto", "ram"])
def test_large_set_is_not_kept(make: Callable[..., Loader], monkeypatch: Any, kind: str) -> None:
    monkeypatch.setattr(cache_module, "AUTO_BYTES", 20_000)
    monkeypatch.setattr(cache_module, "_free_bytes", lambda _: 40_000)
    loader = make({}, cache=kind)
    expected = [b.images for b in make({}).batches(0, [MicroSlice(0, 23, 0)])]
    for _ in range(2):
        got = [b.images for b in loader.batches(0, [MicroSlice(0, 23, 0)])]
        assert torch.equal(got[0], expected[0])
    assert loader._filler._cache.get(0) is None


NO_POLICY = ALL | {"policy": "none"}


@pytest.mark.parametrize("crop", ["random_resized", "pad", "none"])
def test_images_kept_on_the_device_look_the_same(
    make: Callable[..., Loader], data_config: Callable[..., Data], crop: str
) -> None:
    std = torch.tensor(data_config().std).view(3, 1, 1)
    pieces = window_slices(0, 23, 5, 0, 1)
    for augment in (None, NO_POLICY | {"crop": crop}):
        resident, usual = make(augment, cache="gpu"), make(augment)
        for epoch in (0, 1):
            for ours, theirs in zip(
                resident.batches(epoch, pieces), usual.batches(epoch, pieces), strict=True
            ):
                steps = (ours.images - theirs.images).abs() * 255 * std
                assert steps.max() < 2.5 and steps.mean() < 0.5
                assert torch.equal(ours.targets, theirs.targets)
                assert ours.ids.tolist() == theirs.ids.tolist()


def test_what_does_not_fit_on_the_device_is_refused(
    make: Callable[..., Loader], monkeypatch: Any
) -> None:
    monkeypatch.setattr(cache_module, "_free_bytes", lambda _: 20_000)
    with pytest.raises(UserError, match=r"data.cache = gpu: .*use data.cache=off"):
        make({}, cache="gpu")


def decoding_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("decode")]


def test_closing_ends_the_threads(make: Callable[..., Loader]) -> None:
    stream = make(ALL).batches(0, window_slices(0, 23, 1, 0, 1))
    next(stream)
    assert decoding_threads()
    stream.close()
    assert not decoding_threads()
    assert list(stream) == []


def test_a_bug_in_a_thread_reaches_the_consumer(
    make: Callable[..., Loader], monkeypatch: Any
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(fill_module, "eval_image", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        list(make(None).batches(0, [MicroSlice(0, 23, 0)]))
    assert not decoding_threads()


def test_prefetching_is_bounded(make: Callable[..., Loader]) -> None:
    taken = []

    def slices() -> Iterable[MicroSlice]:
        for piece in window_slices(0, 23, 1, 0, 1):
            taken.append(piece)
            yield piece

    stream = make({}, prefetch=3).batches(0, slices())
    for ready in range(1, 8):
        next(stream)
        assert len(taken) == ready + 3
    stream.close()


def test_waiting_is_measured(make: Callable[..., Loader], monkeypatch: Any) -> None:
    gate = threading.Event()
    original = eval_image

    def late(*args: Any, **options: Any) -> Image.Image:
        gate.wait(10)
        return original(*args, **options)

    monkeypatch.setattr(fill_module, "eval_image", late)
    loader = make(None)
    assert loader.wait_seconds == 0
    timer = threading.Timer(0.1, gate.set)
    timer.start()
    list(loader.batches(0, [MicroSlice(0, 4, 0)]))
    assert loader.wait_seconds > 0.02


@pytest.mark.parametrize("augment", [None, ALL], ids=["eval", "mix"])
def test_processes_give_what_threads_give(
    make: Callable[..., Loader], augment: dict[str, Any] | None
) -> None:
    threads, processes = make(augment), make(augment, worker_kind="process", threads=3, prefetch=2)
    pieces = window_slices(0, 23, 5, 0, 1)
    for epoch in (0, 1):
        ours = processes.batches(epoch, pieces)
        for got, expected in zip(ours, threads.batches(epoch, pieces), strict=True):
            assert torch.equal(got.images, expected.images)
            assert torch.equal(got.targets, expected.targets)
            assert got.ids.tolist() == expected.ids.tolist()
        next(processes.batches(epoch, pieces)).images  # noqa: B018 - given up in the middle
    processes.close()


@pytest.mark.parametrize("augment", [None, ALL], ids=["eval", "mix"])
def test_processes_name_what_is_unreadable(
    make: Callable[..., Loader], damaged: Path, augment: dict[str, Any] | None
) -> None:
    skipping = make(augment, root=damaged, on_error="skip", worker_kind="process")
    list(skipping.batches(0, window_slices(0, 23, 4, 0, 1)))
    assert sorted(skipping.skipped) == ["class0/00.png", "class1/01.png"]
    stopping = make(augment, root=damaged, worker_kind="process")
    with pytest.raises(UserError, match=r"class[01]/0[01].png cannot be read: "):
        list(stopping.batches(0, [MicroSlice(0, 23, 0)]))
    for loader in (skipping, stopping):
        loader.close()


def test_a_worker_that_dies_is_told(make: Callable[..., Loader]) -> None:
    loader = make({}, worker_kind="process", threads=2)
    stream = loader.batches(0, window_slices(0, 23, 1, 0, 1))
    next(stream)
    os.kill(loader._workers.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"killed by SIGKILL .*data.workers"):
        for _ in range(3):  # what was decoded before is still handed out
            list(stream)
            stream = loader.batches(0, window_slices(0, 23, 1, 0, 1))
    loader.close()


def test_workers_end_with_their_process(image_root: Path) -> None:
    code = """
    import os, sys, signal
    from lockstep.data.workers import Filled, Processes
    workers = Processes(lambda *_: None, 2, pinned=False)
    print(*workers.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    deadline = time.monotonic() + 10
    for pid in map(int, done.stdout.split()):
        while is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_many_epochs_take_no_more_memory(make: Callable[..., Loader], kind: str) -> None:
    loader = make(ALL, worker_kind=kind, cache="off")
    pids = [os.getpid(), *getattr(loader._workers, "pids", [])]

    def megabytes(epochs: range) -> float:
        for epoch in epochs:
            for _ in loader.batches(epoch, window_slices(0, 23, 4, 0, 1)):
                pass
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids]
        return sum(pages) * 4096 / 1e6

    before = megabytes(range(10))
    assert megabytes(range(10, 60)) - before < 10
    loader.close()


def test_device_takes_the_same_share_always() -> None:
    indices = np.arange(100_000)
    taken = device_takes(indices, 0.37)
    assert abs(taken.mean() - 0.37) < 0.01
    np.testing.assert_array_equal(device_takes(indices[::-1], 0.37)[::-1], taken)
    assert not device_takes(indices, 0.0).any() and device_takes(indices, 1.0).all()
    assert (device_takes(indices, 0.5) >= taken).all()


@pytest.fixture
def jpeg_root(tmp_path: Path, picture: Callable[..., Image.Image]) -> Path:
    """Files of all kinds: what a GPU decodes, and what it does not."""
    root = tmp_path / "jpegs"
    for c in range(2):
        folder = root / "train" / f"class{c}"
        folder.mkdir(parents=True)
        for i in range(8):
            picture(60 + 9 * i, 90 - 5 * i).save(folder / f"{i}.jpg", quality=95)
        picture(70, 60).save(folder / "progressive.jpg", progressive=True, quality=95)
        picture(70, 60).convert("L").save(folder / "grey.jpg", quality=95)
        picture(70, 60).convert("CMYK").save(folder / "cmyk.jpg", quality=95)
        exif = Image.Exif()
        exif[0x0112] = 6
        picture(70, 60).save(folder / "turned.jpg", exif=exif, quality=95)
        picture(70, 60).save(folder / "picture.png")
        picture(9, 8).save(folder / "small.jpg", quality=95)
    return root


class FakeNvJpeg:
    """Decodes on the CPU what a GPU would."""

    def __init__(self, _: Any) -> None:
        pass

    def decode(self, files: list[bytes], _: Any) -> list[torch.Tensor]:
        try:
            return [
                decode_jpeg(torch.frombuffer(bytearray(f), dtype=torch.uint8)).permute(1, 2, 0)
                for f in files
            ]
        except RuntimeError as error:
            raise NvJpegError(str(error)) from error


class FakeGpu(GpuDecoder):
    """Counts what it takes."""

    taken = 0

    def _decode(self, indices: np.ndarray, seeds: np.ndarray) -> Decoded:
        decoded = super()._decode(indices, seeds)
        self.taken += len(decoded.rows)
        return decoded


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_share_decoded_elsewhere_comes_to_its_place(
    make: Callable[..., Loader], jpeg_root: Path, monkeypatch: Any, share: float, kind: str
) -> None:
    monkeypatch.setattr(nvjpeg_module, "NvJpeg", FakeNvJpeg)
    pieces = window_slices(0, 28, 5, 0, 1)
    for augment in (None, NO_POLICY):
        usual = make(augment, root=jpeg_root)
        shared = make(augment, root=jpeg_root, worker_kind=kind)
        shared.gpu_share = share
        shared._gpu_decoder = FakeGpu(shared._filler, shared.device, exif_rotate=True)
        for epoch in range(2):
            for got, expected in zip(
                shared.batches(epoch, pieces), usual.batches(epoch, pieces), strict=True
            ):
                steps = (got.images - expected.images).abs() * 255 * 0.1
                assert steps.mean() < 1 and steps.max() < 20, steps.max()
                assert torch.equal(got.targets, expected.targets)
                assert got.ids.tolist() == expected.ids.tolist()
        takes = device_takes(np.arange(28), share)
        suited = np.array(["0123456789".find(usual.source.name(i)[-5]) >= 0 for i in range(28)])
        at_least = 2 * int((takes & suited).sum())
        assert 0 < at_least <= shared._gpu_decoder.taken  # mixing partners come again
        assert augment is not None or at_least == shared._gpu_decoder.taken
        shared.close()


def test_a_damaged_file_among_those_for_the_gpu(
    make: Callable[..., Loader], jpeg_root: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(nvjpeg_module, "NvJpeg", FakeNvJpeg)
    victim = jpeg_root / "train/class0/3.jpg"
    data = victim.read_bytes()
    victim.write_bytes(data[: len(data) // 2] + b"\xff\xd9")
    decode = FakeNvJpeg.decode

    def refuse(self: FakeNvJpeg, files: list[bytes], sizes: Any) -> list[torch.Tensor]:
        if victim.read_bytes() in files:
            raise NvJpegError("one of them")
        return decode(self, files, sizes)

    monkeypatch.setattr(FakeNvJpeg, "decode", refuse)
    loader = make({}, root=jpeg_root, on_error="skip")
    loader.gpu_share = 1.0
    loader._gpu_decoder = decoder = FakeGpu(loader._filler, loader.device, exif_rotate=True)
    counted = [i for b in loader.batches(0, window_slices(0, 28, 5, 0, 1)) for i in b.ids.tolist()]
    names = {loader.source.name(i) for i in set(range(28)) - set(counted)}
    # The CPU judges it, and nobody else's image: whom it came with must not matter.
    assert decoder.taken == 15 and names <= {"class0/3.jpg"} and set(loader.skipped) == names


def test_interpreter_exits_with_an_open_iterator(image_root: Path) -> None:
    code = """
    import sys, torch
    from pathlib import Path
    from lockstep.config.schema import Data
    from lockstep.data.loader import Loader
    from lockstep.data.sampler import window_slices
    from lockstep.data.source import FolderSource
    data = Data.model_construct(
        mean=(0.5,) * 3, std=(0.5,) * 3, crop_ratio=1.0, interpolation="bilinear",
        on_error="stop", exif_rotate=True, prefetch=4, cache="auto", worker_kind="auto", shuffle_block=1,
    )
    loader = Loader(
        FolderSource.open(Path(sys.argv[1]), "train"), data, None,
        image_size=8, seed=0, device=torch.device("cpu"), threads=2,
    )
    stream = loader.batches(0, window_slices(0, 23, 1, 0, 1))
    next(stream)
    print("ready", flush=True)
    raise KeyboardInterrupt
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(image_root)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ready\n" and done.returncode != 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("augment", [None, ALL], ids=["eval", "mix"])
def test_gpu_gets_the_same_batches(
    image_root: Path,
    data_config: Callable[..., Data],
    augment_config: Callable[..., Augment],
    augment: dict[str, Any] | None,
) -> None:
    def batches(device: str) -> list[Batch]:
        loader = Loader(
            FolderSource.open(image_root, "train"),
            data_config(),
            None if augment is None else augment_config(**augment),
            image_size=SIZE,
            seed=0,
            device=torch.device(device),
            threads=2,
        )
        return list(loader.batches(0, window_slices(0, 23, 5, 0, 2)))

    for here, there in zip(batches("cpu"), batches("cuda"), strict=True):
        assert there.images.is_contiguous(memory_format=torch.channels_last)
        for name in ("images", "targets", "weights", "seeds"):
            assert getattr(there, name).is_cuda
            torch.testing.assert_close(
                getattr(there, name).cpu(), getattr(here, name), rtol=1e-5, atol=1e-5
            )
        np.testing.assert_array_equal(there.ids, here.ids)
