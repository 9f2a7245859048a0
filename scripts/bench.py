"""Measure training steps on synthetic images, beside plain PyTorch and timm, in one run.

python scripts/bench.py --models resnet50,vit_base_patch16_224
python scripts/bench.py --models vit --compile off,default --precisions bf16,tf32 --profile --json new.json --png new.png
python scripts/bench.py --models resnet50 --strategies ddp,fsdp --processes 2 batch.micro=128
python scripts/bench.py --models test_vit --device cpu --image-size 32 --batch 8 --steps 3 --repeat 2
python scripts/bench.py compare old.json new.json --tolerance 0.05

Words at the end are overrides of train.py and hold for all rows, peers included where they concern
model, optimiser, precision or loss. Each row is measured in processes of its own. MFU counts the
FLOPs of the model's forward pass three times, of the GPU's stated dense peak.

exit codes: 0 done, 1 a row could not be measured, or (compare) became slower, 2 a mistake
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.doctor.bench import (
    Matrix,
    Record,
    cases_of,
    compare,
    environment,
    header,
    line,
    read,
    rows_of,
    way_of,
)
from lockstep.doctor.chart import chart
from lockstep.doctor.clock import Effort
from lockstep.doctor.peers import PEERS
from lockstep.doctor.profile import table
from lockstep.door import add_effort, fraction, names, positive, save_json, write
from lockstep.errors import EXIT_FAILURE, EXIT_OK, exit_code

CONF = Path(__file__).resolve().parents[1] / "conf"


def main(argv: list[str] | None = None) -> int:
    """Measure or compare; returns the exit code."""
    words = sys.argv[1:] if argv is None else argv
    return exit_code(
        lambda: run_compare(words[1:]) if words[:1] == ["compare"] else run_bench(words)
    )


def run_bench(argv: list[str]) -> int:
    """Measure every row, print each when it is there."""
    args = parse(argv)
    matrix = Matrix(
        models=args.models,
        strategies=args.strategies,
        precisions=args.precisions,
        compile=args.compile,
        peers=args.peers,
        batch=args.batch,
        image_size=args.image_size,
        device=args.device,
        processes=args.processes,
        overrides=args.overrides,
    )
    effort = Effort(args.steps, args.repeat, args.warmup, args.profile)
    cases = list(cases_of(CONF, matrix))
    result = environment() | {"rows": list[Record]()}
    print(header(), flush=True)
    for row in rows_of(cases, effort, timeout_seconds=args.timeout, reuse=args.reuse):
        result["rows"].append(row)
        print(line(row), flush=True)
        save_json(args.json, result)  # each time: the next may be the last
    rows = result["rows"]
    for row in rows:
        if row.get("profile"):
            print(f"\n{row['model']}, {way_of(row)}\n{table(row['profile'])}")
    if args.png is not None:
        gpu = next((row["gpu"] for row in rows if row.get("gpu")), "CPU")
        torch, date = result["versions"]["torch"], result["date"]
        title = f"training on synthetic images: {gpu}, torch {torch}, {date}, {args.repeat} repeats"
        page = chart(rows, title)
        write("--png", args.png, page.save)
    return EXIT_FAILURE if any("error" in row for row in rows) else EXIT_OK


def run_compare(argv: list[str]) -> int:
    """Say which rows became slower."""
    parser = argparse.ArgumentParser(prog="bench.py compare")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--tolerance", type=fraction, default=0.05, help="of the old images/s")
    args = parser.parse_args(argv)
    lines, slower = compare(read(args.old), read(args.new), args.tolerance)
    print("\n".join(lines))
    return EXIT_FAILURE if slower else EXIT_OK


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of a measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=names, default=["resnet50", "vit_base_patch16_224"],
        help="groups of conf/model or any of timm, comma between them")  # fmt: skip
    add("--strategies", type=names, default=["single"])
    add("--precisions", type=names, default=["bf16"])
    add("--compile", type=names, default=["auto", "off"], help="values of the key compile")
    add("--processes", type=positive, default=1, help="or GPUs")
    add("--peers", action=argparse.BooleanOptionalAction, default=True,
        help=f"measure {', '.join(PEERS)}, too")  # fmt: skip
    add("--profile", action="store_true", help="time by kind of kernel, after the repeats")
    add("--reuse", action="store_true",
        help="let a row find what was compiled before; else each compiles anew")  # fmt: skip
    add_effort(parser)
    args = parser.parse_intermixed_args(argv)
    args.peers = list(PEERS) if args.peers else []
    return args


if __name__ == "__main__":
    sys.exit(main())
