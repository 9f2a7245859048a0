"""Export a checkpoint of a run as safetensors that timm loads, with a card beside it.

python scripts/export.py runs/NAME                              its newest good checkpoint
python scripts/export.py runs/NAME/checkpoints/step-N --weights raw --to model.safetensors

A finished run holds the export of its last step already: runs/NAME/model.safetensors.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.errors import EXIT_OK, exit_code
from lockstep.evaluation import export, read_checkpoint


def main(argv: list[str] | None = None) -> int:
    """Export, print where to, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("where", type=Path, metavar="RUN", help="a run folder or a step-N folder")
    parser.add_argument(
        "--weights",
        choices=("auto", "raw", "ema"),
        default="auto",
        help="auto: the averaged ones where there are any",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE",
        help="FILE.safetensors, the card is FILE.json; default: model-step-N-WEIGHTS.safetensors",
    )
    args = parser.parse_args(argv)
    return exit_code(lambda: write(args))


def write(args: argparse.Namespace) -> int:
    """Export and print where to."""
    weights = read_checkpoint(args.where, args.weights)
    to = args.to or Path(f"model-step-{weights.step}-{weights.kind}.safetensors")
    export(weights, to)
    for note in weights.notes:
        print(note, file=sys.stderr)
    print(f"{to}: {weights.kind} weights of step {weights.step:,}; {to.with_suffix('.json')}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
