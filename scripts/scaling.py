"""Measure how training speeds up from one GPU to several, on synthetic images and on files.

python scripts/scaling.py --json scaling.json --png scaling.png
python scripts/scaling.py --models resnet50 --strategies ddp --precisions bf16 --images /path/to/imagenet
python scripts/scaling.py --models vit --strategies ddp,fsdp-grad_op --precisions bf16,tf32 --counts 2,4,8
python scripts/scaling.py --models test_vit --device cpu --counts 2 --image-size 32 --batch 4 --steps 3 --precisions fp32

Every GPU computes --batch images a step, however many there are. Speed-up is over strategy=single
on one GPU with the same precision; efficiency is speed-up / GPUs. Exposed communication is the time
of NCCL's (gloo's) work in which nothing else runs, in a few steps under a profiler. --device cpu
measures processes instead of GPUs. Words at the end are overrides of train.py for all rows.

exit codes: 0 done, 1 a row could not be measured, 2 a mistake
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.doctor.bench import Record, environment, rows_of
from lockstep.doctor.chart import chart
from lockstep.doctor.clock import Effort
from lockstep.doctor.scaling import (
    SHARING,
    cases_of,
    counts_up_to,
    for_chart,
    header,
    line,
    with_speed_up,
)
from lockstep.door import add_effort, names, positive, save_json, write
from lockstep.errors import EXIT_FAILURE, EXIT_OK, exit_code
from lockstep.launch.prepare import machine

USUAL = ("dp", "ddp", "ddp-after", "fsdp-full", "fsdp-grad_op", "fsdp-wrap_model")
CONF = Path(__file__).resolve().parents[1] / "conf"


def main(argv: list[str] | None = None) -> int:
    """Measure every row, print each when it is there; returns the exit code."""
    return exit_code(lambda: run(parse(argv)))


def run(args: argparse.Namespace) -> int:
    """As :func:`main`, with checked options."""
    gpus = 0 if args.device == "cpu" else machine().num_gpus
    words = [
        f"device={args.device}",
        f"compile={args.compile}",
        f"data.image_size={args.image_size}",
    ]
    cases = list(
        cases_of(
            CONF,
            models=args.models,
            strategies=args.strategies or [name for name in USUAL if gpus or name != "dp"],
            precisions=args.precisions,
            counts=args.counts or counts_up_to(max(gpus, 1)),
            words=words,
            overrides=args.overrides,
            batch=args.batch,
            images=args.images,
        )
    )
    effort = Effort(args.steps, args.repeat, args.warmup, profile=True)
    result, rows = environment(), list[Record]()
    print(header(), flush=True)
    for row in rows_of(cases, effort, timeout_seconds=args.timeout, reuse=not args.cold):
        rows = with_speed_up([*rows, row])
        print(line(rows[-1]), flush=True)
        save_json(args.json, result | {"rows": rows})
    if args.png is not None:
        gpu = next((row["gpu"] for row in rows if row.get("gpu")), "processes on the CPU")
        title = (
            f"{gpu}: batch {args.batch} each, torch {result['versions']['torch']}, {result['date']}"
        )
        write("--png", args.png, chart([for_chart(row) for row in rows], title).save)
    return EXIT_FAILURE if any("error" in row for row in rows) else EXIT_OK


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", type=names, default=["resnet50", "vit_base_patch16_224"])
    add("--strategies", type=names, help=f"of {', '.join(SHARING)}; default: all but hsdp")
    add("--precisions", type=names, default=["fp32", "tf32", "bf16"])
    add("--compile", default="auto", help="value of the key compile")
    add("--counts", type=counts, help="numbers of GPUs beside one; default: 2, 4, ... and all")
    add("--images", type=Path, metavar="ROOT",
        help="folder with train/ and val/: measure every row with its images, too, read and decoded")  # fmt: skip
    add("--cold", action="store_true", help="let each row compile anew, as in bench.py")
    add_effort(parser)
    return parser.parse_intermixed_args(argv)


def counts(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [positive(word) for word in names(text)]


if __name__ == "__main__":
    sys.exit(main())
