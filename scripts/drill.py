"""Break a small real run in every way at every place, and say what is left of it.

python scripts/drill.py
python scripts/drill.py --only SIGKILL,NaN --rank 0 --place save --jobs 2

exit codes: 0 nothing is lost, 1 a run is LOST, 2 a mistake
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from lockstep.door import positive, save_json
from lockstep.drill import FILES, PLACES_OF, RANKS, Cell, all_cells, prepare, run_cells, table
from lockstep.drill.faults import PLACES
from lockstep.errors import EXIT_FAILURE, EXIT_OK, exit_code

CONF = Path(__file__).resolve().parents[1] / "conf"


def main(argv: list[str] | None = None) -> int:
    """Run the cells, print the table and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    faults = ", ".join(PLACES_OF)
    parser.add_argument("--only", metavar="FAULT[,FAULT]", default="", help=f"of {faults}")
    parser.add_argument("--rank", type=int, choices=RANKS, help="strike this one only")
    parser.add_argument("--place", choices=(*PLACES, *FILES), help="strike there only")
    parser.add_argument(
        "--async",
        action="store_true",
        dest="asynchronous",
        help="save behind the training, as on GPUs",
    )
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="cells at the same time"
    )
    parser.add_argument("--folder", type=Path, help="where the runs live; default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    args = parser.parse_args(argv)
    only = [name.strip() for name in args.only.split(",") if name.strip()]
    if unknown := [name for name in only if name not in PLACES_OF]:
        parser.error(f"--only {unknown[0]}: must be of {faults}")
    cells = all_cells(only, args.rank, args.place)
    if not cells:
        parser.error("no fault of --only strikes this --rank at this --place")
    folder = args.folder
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="lockstep-drill-"))
    elif folder.exists() and any(folder.iterdir()):
        parser.error(f"--folder {folder}: must be empty or new")
    return exit_code(lambda: run(args, cells, folder), f"stopped; the runs are in {folder}")


def run(args: argparse.Namespace, cells: list[Cell], folder: Path) -> int:
    began, outcomes = time.monotonic(), []
    site = prepare(CONF, folder.resolve(), asynchronous=args.asynchronous)
    for cell, outcome, seconds in run_cells(site, cells, jobs=args.jobs):
        outcomes.append((cell, outcome, seconds))
        where = f"{len(outcomes)}/{len(cells)}  {cell}"
        print(f"{where}: {outcome.verdict}, {outcome.why} ({seconds:.0f} s)", flush=True)
    print("\n" + table(outcomes, time.monotonic() - began))
    told = [asdict(cell) | asdict(o) | {"seconds": round(s, 1)} for cell, o, s in outcomes]
    save_json(args.json, told)
    if any(outcome.verdict == "LOST" for _, outcome, _ in outcomes):
        print(f"the runs are in {folder}")
        return EXIT_FAILURE
    if args.folder is None:
        shutil.rmtree(folder)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
