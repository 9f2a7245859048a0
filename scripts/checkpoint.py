"""Look after the checkpoints of a run.

python scripts/checkpoint.py list runs/NAME
python scripts/checkpoint.py verify runs/NAME                    reads every file
python scripts/checkpoint.py prune runs/NAME --keep-last 1 --keep-best --dry-run
python scripts/checkpoint.py consolidate runs/NAME --step 400 model.safetensors

exit codes: 0 done, 1 verify found a damaged checkpoint or no good one, 2 a mistake in the command
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from pathlib import Path

from lockstep.checkpoint.manage import Entry, best, prune, step_folder, survey
from lockstep.door import aligned, positive
from lockstep.errors import EXIT_FAILURE, EXIT_OK, exit_code


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, what: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=what, description=what)
        added.add_argument("run", type=Path, metavar="RUN", help="a run folder")
        return added

    listing = command("list", "steps, figures, sizes; manifests and file sizes are looked at")
    listing.set_defaults(do=lambda args: show(args.run))
    verifying = command("verify", "read every file and compare its checksum")
    verifying.set_defaults(do=lambda args: check(args.run))
    pruning = command("prune", "delete old and damaged checkpoints and leftovers of saves")
    pruning.add_argument("--keep-last", type=positive, required=True, metavar="N")
    pruning.add_argument("--keep-best", action="store_true", help="and the one of the best top-1")
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    pruning.set_defaults(do=thin_out)
    whole = command("consolidate", "write whole weights as safetensors, with their card")
    whole.add_argument("out", type=Path, metavar="OUT.safetensors")
    whole.add_argument("--step", type=int, metavar="N", help="default: the newest good one")
    whole.add_argument("--weights", choices=("auto", "raw", "ema"), default="auto")
    whole.set_defaults(do=consolidate)
    args = parser.parse_args(argv)
    return exit_code(lambda: int(args.do(args)))


def show(run: Path) -> int:
    """Print a table."""
    entries = survey(run, thorough=False)
    newest = next((entry for entry in entries if entry.state == "good"), None)
    top = best(entries)
    rows = [("step", "top-1", "when", "MB", "state", "")]
    for entry in entries:
        marks = [mark for mark, is_it in (("newest", newest), ("best", top)) if entry is is_it]
        top1 = f"{entry.metric:.2f} %" if entry.metric is not None else "-"
        when = time.localtime(entry.committed_at) if entry.committed_at is not None else None
        rows.append(
            (
                entry.path.name.removeprefix("step-"),
                top1,
                time.strftime("%Y-%m-%d %H:%M:%S", when) if when else "-",
                f"{entry.size / 1e6:,.1f}",
                told(entry),
                ", ".join(marks),
            )
        )
    print("\n".join(aligned(rows, right=(0, 1, 3))))
    return EXIT_OK


def check(run: Path) -> int:
    """Print one line for each checkpoint."""
    entries = survey(run, thorough=True)
    for entry in entries:
        print(f"{entry.path.name}: {told(entry)}, {entry.size / 1e6:,.1f} MB")
    states = {entry.state for entry in entries}
    if "good" not in states:
        print(f"{run}: no good checkpoint")
    return EXIT_OK if "good" in states and "damaged" not in states else EXIT_FAILURE


def thin_out(args: argparse.Namespace) -> int:
    """Delete, and print what went and what stays."""
    # The launcher's room: heavy to import, and only this subcommand changes a run.
    from lockstep.launch.folder import run_lock

    survey(args.run, thorough=False)  # the lock would make a folder of a mistyped name
    with nullcontext() if args.dry_run else run_lock(args.run):
        kept, deleted = prune(
            args.run, keep_last=args.keep_last, keep_best=args.keep_best, dry_run=args.dry_run
        )
    for entry in deleted:
        verb = "would delete" if args.dry_run else "deleted"
        print(f"{verb} {entry.path.name} ({told(entry)}), {entry.size / 1e6:,.1f} MB")
    print(f"kept: {', '.join(entry.path.name for entry in kept)}")
    return EXIT_OK


def consolidate(args: argparse.Namespace) -> int:
    """Export the weights of any step; as scripts/export.py, which takes the newest."""
    from lockstep.evaluation import export, read_checkpoint

    where = args.run if args.step is None else step_folder(args.run, args.step)
    weights = read_checkpoint(where, args.weights)
    export(weights, args.out)
    for note in weights.notes:
        print(note, file=sys.stderr)
    print(f"{args.out}: {weights.kind} weights of step {weights.step:,}")
    return EXIT_OK


def told(entry: Entry) -> str:
    """State and reason."""
    return f"{entry.state}: {entry.why}" if entry.why else entry.state


if __name__ == "__main__":
    sys.exit(main())
