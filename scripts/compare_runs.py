"""Say whether two run folders hold the same run, or where they part.

python scripts/compare_runs.py runs/A runs/B
python scripts/compare_runs.py runs/A runs/B --tolerance 0    # bit for bit

exit codes: 0 the same run, 1 different runs, 2 not comparable
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.errors import EXIT_FAILURE, EXIT_OK, exit_code
from lockstep.telemetry.compare import compare_runs


def main(argv: list[str] | None = None) -> int:
    """Compare and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", type=Path, metavar="A", help="a run folder")
    parser.add_argument("b", type=Path, metavar="B", help="another one")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, help="relative difference allowed, default: 1e-4"
    )
    args = parser.parse_args(argv)
    if not args.tolerance >= 0:
        parser.error(f"--tolerance {args.tolerance}: must be 0 or more")
    return exit_code(lambda: compare(args.a, args.b, args.tolerance))


def compare(a: Path, b: Path, tolerance: float) -> int:
    """Compare, and print where they part."""
    found = compare_runs(a, b, tolerance=tolerance)
    print(found.text())
    return EXIT_OK if found.parting is None else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
