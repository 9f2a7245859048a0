"""Measure how fast images come, beside other loaders, in one run.

python scripts/bench_data.py --root /path/to/images --threads 2
python scripts/bench_data.py --root /path/to/images --threads 16 --device cuda --json bench.json
python scripts/bench_data.py --root /path/to/images --threads 16 --device cuda --train resnet50 --batch 256
python scripts/bench_data.py --growth 1000,100000,1000000 --root /path/to/images

RandomResizedCrop(224), flip, normalised, batches on the device. With --train, each batch is trained
on (compiled, bf16 autocast, SGD), and "synthetic" is the same batch again and again. --root holds train/<class>/*. The
packed form (short side 256) is made in a temporary folder. Peers that are not installed are named.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hydra import compose, initialize_config_dir

from lockstep.config.bind import bind
from lockstep.config.schema import Config
from lockstep.data import open_split
from lockstep.data.loader import Loader
from lockstep.data.nvjpeg import share_for_gpu
from lockstep.data.pack import pack
from lockstep.data.sampler import window_slices
from lockstep.door import save_json
from lockstep.engine.graphs import PassGraphs
from lockstep.errors import EXIT_OK, UserError, exit_code
from lockstep.models.fast import compile_in_place

CONF = Path(__file__).resolve().parents[1] / "conf"
SIZE, MEAN, STD = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHORT_SIDE = 256

SETTLED_SECONDS = 3
"""A folder that has just changed is not remembered."""

Batches = Generator[torch.Tensor, None, None]
WARM_UP = 4


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write JSON; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root", type=Path, required=True, help="folder that holds train/<class>/*"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--images", type=int, default=2000, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--train", default="", help="a model of timm that trains on what comes")
    parser.add_argument("--only", default="", help="names, comma between them")
    parser.add_argument("--growth", default="", help="numbers of entries: cost of opening instead")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    return exit_code(lambda: run(args))


def run(args: argparse.Namespace) -> int:
    result = growth(args) if args.growth else speed(args)
    save_json(args.json, result | {"machine": machine(args)})
    return EXIT_OK


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Images per second of every loader, the loaders in turn, ``--repeat`` times."""
    usual = [n for n in LOADERS if args.device.startswith("cuda") or n not in NEEDS_GPU]
    wanted = [name for name in args.only.split(",") if name] or usual
    if unknown := [name for name in wanted if name not in LOADERS]:
        raise UserError(f"--only {unknown[0]}: must be of {', '.join(LOADERS)}")
    rows: dict[str, dict[str, list[float]]] = {}
    consume = trainer(args) if args.train else lambda _: None
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        packed = Path(folder)
        if any("packed" in name for name in wanted):
            pack(
                args.root,
                packed,
                splits=["train"],
                short_side=SHORT_SIDE,
                threads=args.threads,
                on_error="skip",
            )
        for _ in range(args.repeat):
            for name in wanted:
                needs, start = LOADERS[name]
                if needs and not installed(needs):
                    continue
                found = measure(args, partial(start, args, packed), consume)
                for key, value in found.items():
                    rows.setdefault(name, {}).setdefault(key, []).append(value)
    base_name = "synthetic" if args.train else "torchvision"
    base = median(rows[base_name]["images_per_second"]) if base_name in rows else None
    print(
        f"{'loader':<24} {'images/s':>9} {'least':>7} {'most':>7} {'ratio':>6} {'cores':>6} {'wait':>6} "
        f"{'GPU':>5} {'first':>7}"
    )
    for name in wanted:
        if name not in rows:
            print(f"{name:<24} not installed: pip install {LOADERS[name][0]}")
            continue
        rates = rows[name]["images_per_second"]
        ratio = f"{median(rates) / base:.2f}" if base else ""
        print(
            f"{name:<24} {median(rates):>9.0f} {min(rates):>7.0f} {max(rates):>7.0f} {ratio:>6} "
            f"{median(rows[name]['cores']):>6.1f} {median(rows[name]['waited']):>6.1%} "
            f"{median(rows[name]['gpu']):>5.0%} {median(rows[name]['first_batch_seconds']):>6.1f}s"
        )
    return {"rows": rows, "images": args.images, "batch": args.batch, "threads": args.threads}


def measure(
    args: argparse.Namespace, start: Callable[[], Batches], consume: Callable[[torch.Tensor], None]
) -> dict[str, float]:
    """One pass over ``--images``: the rate behind the first batches, and what it cost."""
    began = time.perf_counter()
    batches = start()
    consume(next(batches))
    first = time.perf_counter()
    # What was prepared while the first was used is none of the rate.
    for images in islice(batches, WARM_UP):
        consume(images)
    synchronize(args)
    behind, cpu, count, waited = time.perf_counter(), cpu_seconds(), 0, 0.0
    with watched_gpu(args) as used:
        for _ in range(max(1, args.images // args.batch)):
            asked = time.perf_counter()
            images = next(batches)
            waited += time.perf_counter() - asked
            consume(images)
            count += len(images)
        synchronize(args)
        wall = time.perf_counter() - behind
        cpu = cpu_seconds() - cpu
    batches.close()
    return {
        "images_per_second": count / wall,
        "cores": cpu / wall,
        "waited": waited / wall,
        "gpu": sum(used) / max(1, len(used)) / 100,
        "first_batch_seconds": first - began,
    }


def synchronize(args: argparse.Namespace) -> None:
    if args.device.startswith("cuda"):
        torch.cuda.synchronize()


@contextmanager
def watched_gpu(args: argparse.Namespace) -> Iterator[list[int]]:
    """Collect the share of the time in which a kernel ran, percent, as ``nvidia-smi`` sees it.

    A process of its own: a thread that asks the driver would hold up the training's launches.
    """
    used: list[int] = []
    if not args.device.startswith("cuda") or shutil.which("nvidia-smi") is None:
        yield used
        return
    command = "nvidia-smi --query-gpu=utilization.gpu --format=csv,noheader,nounits -i 0 -lms 500"
    with subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield used
        finally:
            process.terminate()
        assert process.stdout is not None
        used += [int(line) for line in process.stdout if line.strip().isdigit()]


def trainer(args: argparse.Namespace) -> Callable[[torch.Tensor], None]:
    """A step as compile=graphs has it; at most two are queued, as in a real loop that logs."""
    from timm import create_model

    model = create_model(args.train).to(args.device)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    compile_in_place(model, "graphs", by_block=False, ours=True, norms=True)
    graphs = PassGraphs(list(model.parameters()))
    targets = torch.randint(1000, (args.batch,), device=args.device)
    queued: deque[torch.cuda.Event] = deque()

    def both(images: torch.Tensor) -> tuple[torch.Tensor]:
        with torch.autocast(torch.device(args.device).type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), targets[: len(images)])
        loss.backward()
        return (loss.detach(),)

    def step(images: torch.Tensor) -> None:
        graphs(both, [images])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if args.device.startswith("cuda"):
            queued.append(torch.cuda.Event(blocking=True))
            queued[-1].record()
            if len(queued) > 2:
                queued.popleft().synchronize()

    return step


def installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def cpu_seconds() -> float:
    """User and system time of this process and its children, alive or ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    spent = sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, kinds))
    ticks = 0
    for thread in Path("/proc/self/task").iterdir():
        for child in (thread / "children").read_text().split():
            with suppress(OSError):
                fields = Path("/proc", child, "stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return spent + ticks / os.sysconf("SC_CLK_TCK")


# --- the loaders ------------------------------------------------------------------------------


def configured(*overrides: str) -> Config:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return bind(compose("config", ["data=folder", "augment=standard", *overrides]))


def lockstep(args: argparse.Namespace, root: Path, *overrides: str) -> Batches:
    cfg = configured(
        f"data.root={root}", "data.cache=off", "data.interpolation=bilinear", *overrides
    )
    source = open_split(cfg.data, "train")
    device = torch.device(args.device)
    loader = Loader(
        source,
        cfg.data,
        cfg.augment.model_copy(
            update={"mixup": 0.0, "cutmix": 0.0, "erasing": 0.0, "policy": "none"}
        ),
        image_size=SIZE,
        seed=0,
        device=device,
        threads=args.threads,
    )
    if cfg.data.decode != "cpu" and (reason := loader.prepare_gpu()) is not None:
        raise UserError(f"data.decode = {cfg.data.decode}: {reason}")
    share = cfg.data.gpu_share
    if cfg.data.decode == "gpu":
        share = 1.0
    elif cfg.data.decode == "hybrid" and share is None:
        rates = loader.rates(1.0)
        share = share_for_gpu(*rates)
        print(f"decoding: {rates[0]:.0f}/s by the CPU, {rates[1]:.0f}/s by the GPU: {share:.0%}")
    loader.gpu_share = share or 0.0
    for epoch in range(10**6):
        stream = loader.batches(epoch, window_slices(0, len(source), args.batch, 0, 1))
        try:
            for batch in stream:
                if len(batch.images) == args.batch:
                    yield batch.images
        except GeneratorExit:
            stream.close()
            loader.close()
            raise


def transform() -> Any:
    """Of torchvision, for a Pillow image."""
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def torchvision(args: argparse.Namespace, _: Path) -> Batches:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    loader = DataLoader(
        ImageFolder(str(args.root / "train"), transform()),
        args.batch,
        shuffle=True,
        num_workers=args.threads,
        prefetch_factor=4,
        pin_memory=args.device.startswith("cuda"),
        drop_last=True,
    )
    while True:
        for images, _targets in loader:
            images = images.to(args.device, non_blocking=True)
            yield images.contiguous(memory_format=torch.channels_last)


def timm(args: argparse.Namespace, _: Path) -> Batches:
    from timm.data import create_dataset, create_loader

    dataset = create_dataset("", root=str(args.root / "train"), is_training=True)
    loader = create_loader(
        dataset,
        input_size=(3, SIZE, SIZE),
        batch_size=args.batch,
        is_training=True,
        num_workers=args.threads,
        color_jitter=0.0,
        interpolation="bilinear",
        mean=MEAN,
        std=STD,
        device=torch.device(args.device),
        use_prefetcher=args.device.startswith("cuda"),
        persistent_workers=False,
    )
    while True:
        for images, _targets in loader:
            if len(images) == args.batch:
                yield images.contiguous(memory_format=torch.channels_last)


def webdataset(args: argparse.Namespace, packed: Path) -> Batches:
    """The same packed tars, read in order by workers and shuffled in a buffer."""
    import webdataset as wds

    shards = sorted(str(path) for path in (packed / "train").glob("*.tar"))
    files = wds.WebDataset(shards, shardshuffle=False, empty_check=False).shuffle(1000)
    pictures = files.decode("pil").to_tuple("jpg;jpeg;png").map_tuple(transform())
    loader = wds.WebLoader(pictures.batched(args.batch), batch_size=None, num_workers=args.threads)
    while True:
        for (images,) in loader:
            yield images.to(args.device, non_blocking=True)


def synthetic(args: argparse.Namespace, _: Path) -> Batches:
    """The same images again and again."""
    images = torch.randn(args.batch, 3, SIZE, SIZE, device=args.device)
    images = images.to(memory_format=torch.channels_last)
    while True:
        yield images


NEEDS_GPU = ("synthetic", "lockstep folder thread", "lockstep folder gpu", "lockstep folder hybrid")

LOADERS: dict[str, tuple[str, Callable[[argparse.Namespace, Path], Batches]]] = {
    "synthetic": ("", synthetic),
    "torchvision": ("", torchvision),
    "timm": ("", timm),
    "lockstep folder": ("", lambda args, _: lockstep(args, args.root)),
    "lockstep folder thread": (
        "",
        lambda args, _: lockstep(args, args.root, "data.worker_kind=thread"),
    ),
    "lockstep folder gpu": ("", lambda args, _: lockstep(args, args.root, "data.decode=gpu")),
    "lockstep folder hybrid": ("", lambda args, _: lockstep(args, args.root, "data.decode=hybrid")),
    "webdataset packed": ("webdataset", webdataset),
    "lockstep packed": ("", lambda args, packed: lockstep(args, packed, "data.source=packed")),
}
"""Name: the package that it needs beside the project's own, and what gives its batches."""


# --- cost as the set grows --------------------------------------------------------------------


def growth(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and memory to open sets of links to the same files, and to their first batch."""
    files = [path for path in sorted((args.root / "train").rglob("*")) if path.is_file()]
    rows = []
    print(f"{'entries':>10} {'open':>8} {'again':>8} {'memory':>9} {'first batch':>12}")
    for number in map(int, args.growth.split(",")):
        with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
            root = Path(folder)
            make_links(files, root / "train", number)
            time.sleep(SETTLED_SECONDS)
            before, began = peak_bytes(), time.perf_counter()
            cfg = configured(f"data.root={root}", "data.cache=off")
            source = open_split(cfg.data, "train")
            opened = time.perf_counter() - began
            grown = peak_bytes() - before
            began = time.perf_counter()
            open_split(cfg.data, "train")
            again = time.perf_counter() - began
            began = time.perf_counter()
            stream = lockstep(args, root)
            next(stream)
            stream.close()
            row = {
                "entries": len(source),
                "open_seconds": opened,
                "again_seconds": again,
                "memory_bytes": grown,
                "first_batch_seconds": time.perf_counter() - began - again,
            }
        rows.append(row)
        print(
            f"{number:>10,} {opened:>7.2f}s {again:>7.2f}s {grown / 2**20:>6.0f}MiB "
            f"{row['first_batch_seconds']:>11.2f}s"
        )
    return {"growth": rows}


def make_links(files: list[Path], folder: Path, number: int) -> None:
    for i in range(number):
        place = folder / f"class{i % 1000 if number >= 2000 else i % 10:04d}"
        if i < 1000:
            place.mkdir(parents=True, exist_ok=True)
        (place / f"{i:08d}.jpg").symlink_to(files[i % len(files)])


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What a figure needs beside it."""
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else None
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("torchvision", "timm", "pillow", "simplejpeg", "webdataset"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {"cores": len(os.sched_getaffinity(0)), "gpu": gpu, "versions": versions}


if __name__ == "__main__":
    sys.exit(main())
