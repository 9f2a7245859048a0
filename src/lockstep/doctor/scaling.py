"""How training speeds up with GPUs: each way of sharing beside one GPU alone, the batch of each fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from lockstep.doctor import case
from lockstep.doctor.bench import Case, Record, Refused, make_case, model_words, way_of
from lockstep.errors import UserError
from lockstep.launch.prepare import machine

ALONE = "single"
SHARING = {
    "dp": ["strategy=dp"],
    "ddp": ["strategy=ddp"],
    "ddp-after": ["strategy=ddp", "strategy.reduce=after"],
    "fsdp-full": ["strategy=fsdp", "strategy.shard=full"],
    "fsdp-grad_op": ["strategy=fsdp", "strategy.shard=grad_op"],
    "fsdp-wrap_model": ["strategy=fsdp", "strategy.shard=grad_op", "strategy.wrap=model"],
    "hsdp": ["strategy=hsdp"],
}
"""What ``--strategies`` may name."""


def counts_up_to(gpus: int) -> list[int]:
    """1, 2, 4, ... and all of them."""
    powers = [2**i for i in range(gpus.bit_length()) if 2**i <= gpus]
    return sorted({*powers, gpus})


def cases_of(
    conf: Path,
    *,
    models: Sequence[str],
    strategies: Sequence[str],
    precisions: Sequence[str],
    counts: Sequence[int],
    words: Sequence[str],
    overrides: Sequence[str],
    batch: int,
    images: Path | None = None,
) -> Iterator[Case | tuple[Record, str]]:
    """One GPU alone, then each way of sharing with each number of GPUs; refusals as in a benchmark.

    Args:
        strategies: of :data:`SHARING`.
        words: of every case: device, compile, image size.
        batch: images of one GPU in a step.
        images: folder of images with which every case is measured once more.

    Raises:
        UserError: a word that no case could be made of.
    """
    if unknown := [name for name in strategies if name not in SHARING]:
        raise UserError(f"--strategies {unknown[0]}: must be of {', '.join(SHARING)}")
    on_cpu = "device=cpu" in words or not machine().num_gpus
    if on_cpu and "dp" in strategies:
        raise UserError("--strategies dp: DataParallel shares one process's GPUs; there are none")
    for model in models:
        for precision in precisions:
            base = [*model_words(conf, model), f"precision={precision}", *words]
            asked = [(1, ALONE, ["strategy=single"])]
            asked += [(n, name, SHARING[name]) for name in strategies for n in counts if n > 1]
            sources = [None] if images is None else [None, images]
            for (number, name, how), source in product(asked, sources):
                try:
                    yield make_case(
                        conf,
                        case.LOCKSTEP,
                        [*base, *how],
                        overrides,
                        processes=number,
                        batch=batch,
                        images=source,
                    )
                except Refused as exc:
                    told = {"model": model, "way": case.LOCKSTEP, "strategy": name}
                    told |= {"precision": precision, "compile": "?"}
                    yield told | {"processes": number}, str(exc)


def with_speed_up(rows: Sequence[Record]) -> list[Record]:
    """The rows with ``speed_up`` over one GPU alone and ``efficiency``; None without its row."""
    alone = {
        _without_sharing(row): row["images_per_second"]["median"]
        for row in rows
        if row["strategy"] == ALONE and "error" not in row
    }
    out = []
    for row in rows:
        base = alone.get(_without_sharing(row))
        if base is None or "error" in row:
            out.append(row | {"speed_up": None, "efficiency": None})
            continue
        speed_up = row["images_per_second"]["median"] / base
        efficiency = speed_up / row["processes"]
        out.append(row | {"speed_up": round(speed_up, 3), "efficiency": round(efficiency, 4)})
    return out


def _without_sharing(row: Record) -> tuple[Any, ...]:
    return row["model"], row["precision"], row.get("images")


def header() -> str:
    """Of the columns of :func:`line`."""
    return (
        f"{'model':<22} {'way':<54} {'GPUs':>4} {'images/s':>9} {'speed-up':>8} {'efficiency':>10} "
        f"{'memory':>9} {'exposed communication':>22}"
    )


def line(row: Mapping[str, Any]) -> str:
    """A row as :func:`with_speed_up` gives it."""
    start = f"{row['model']:<22} {way_of(row):<54} {row['processes']:>4}"
    if "error" in row:
        return f"{start} {row['error']}"
    speed_up = "" if row["speed_up"] is None else f"{row['speed_up']:.2f}x"
    efficiency = "" if row["efficiency"] is None else f"{row['efficiency']:.1%}"
    used = "" if row["memory_bytes"] is None else f"{row['memory_bytes'] / 2**30:.2f} GiB"
    seen, exposed = row["profile"], ""
    if seen and seen.get("communication_ms"):
        ms = seen["exposed_communication_ms"]
        exposed = f"{ms:.2f} ms, {ms / seen['step_ms']:.1%}"
    rate = row["images_per_second"]["median"]
    return f"{start} {rate:>9,.0f} {speed_up:>8} {efficiency:>10} {used:>9} {exposed:>22}"


def for_chart(row: Mapping[str, Any]) -> Record:
    """The row with its speed-up told behind the bar, and without a roofline of its own."""
    note = (
        "" if row.get("speed_up") is None else f"  {row['speed_up']:.2f}x, {row['efficiency']:.0%}"
    )
    return dict(row) | {"note": note, "roofline_images_per_second": None}
