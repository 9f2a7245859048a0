"""Resolve params.yaml to the one file from which train.py runs: a stage of dvc.yaml.

python scripts/resolve_config.py --to build/config --packed build/packed src/lockstep train.py

Writes config.yaml, and beside it the file `run`, which holds the path of the run's folder.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.config.bind import save_config
from lockstep.config.pipeline import resolve
from lockstep.errors import EXIT_OK, exit_code

CONF = Path(__file__).resolve().parents[1] / "conf"


def main(argv: list[str] | None = None) -> int:
    """Write both files and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "inputs",
        type=Path,
        nargs="*",
        metavar="INPUT",
        help="files and folders that make another run when they change",
    )
    parser.add_argument(
        "--packed", type=Path, metavar="FOLDER", help="train from these images; an input, too"
    )
    parser.add_argument("--params", type=Path, default=Path("params.yaml"), metavar="FILE")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    return exit_code(lambda: write(args))


def write(args: argparse.Namespace) -> int:
    config = resolve(CONF, args.params, args.inputs, packed=args.packed)
    args.to.mkdir(parents=True, exist_ok=True)
    save_config(config, args.to / "config.yaml")
    assert config.run.name is not None
    run_dir = Path(config.run.root) / config.run.name
    (args.to / "run").write_text(f"{run_dir}\n")
    print(run_dir)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
