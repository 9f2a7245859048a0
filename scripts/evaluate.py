"""Evaluate trained weights on the validation images, in one process.

python scripts/evaluate.py runs/NAME                         its newest good checkpoint
python scripts/evaluate.py runs/NAME/checkpoints/step-N
python scripts/evaluate.py model.safetensors --data /my/images --json figures.json
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.door import positive, save_json
from lockstep.errors import EXIT_OK, exit_code
from lockstep.evaluation import evaluate_weights, read_weights


def main(argv: list[str] | None = None) -> int:
    """Evaluate, print the figures and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "where",
        type=Path,
        metavar="RUN_OR_FILE",
        help="a run folder, a step-N folder or an exported .safetensors file",
    )
    parser.add_argument(
        "--data", type=Path, metavar="ROOT", help="folder that holds val; default: the run's own"
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "raw", "ema"),
        default="auto",
        help="auto: the averaged ones where there are any",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="images in a forward pass; default: the run's own",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args(argv)
    return exit_code(lambda: evaluate(args))


def evaluate(args: argparse.Namespace) -> int:
    """Evaluate, print and write the figures."""
    weights = read_weights(args.where, args.weights)
    done = evaluate_weights(weights, root=args.data, batch=args.batch, device=args.device)
    save_json(args.json, done.to_json())
    for note in [*weights.notes, *done.notes]:
        print(note, file=sys.stderr)
    print(done.text())
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
