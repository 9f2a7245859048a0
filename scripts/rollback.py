"""Go back to an earlier version of data and weights, and forth again.

python scripts/rollback.py list                     commits that brought other data or weights
python scripts/rollback.py diff v1 v2               files, configuration and metrics that differ
python scripts/rollback.py to v1                    all of v1; --data or --checkpoints: a part of it
python scripts/rollback.py verify                   evaluate the weights, compare with their card
python scripts/rollback.py undo                     as it was before the last `to`

What is restored shows as staged changes: HEAD stays where it is, and `git commit` keeps them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.door import aligned
from lockstep.errors import EXIT_FAILURE, EXIT_OK, UserError, exit_code
from lockstep.versions.history import WEIGHTS, Counts, Version, difference, versions
from lockstep.versions.repository import Repository
from lockstep.versions.rollback import PARTS, Done, opened, roll_back, undo

MOST_FOLDERS = 20
"""Rows of ``diff`` about data."""


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="the versions, newest first")
    command.add_argument("-n", type=int, default=20, metavar="N", help="at most, default: 20")
    command.set_defaults(run=lambda args: show_list(args.n))
    command = commands.add_parser("to", help="restore a version, or parts of it")
    command.add_argument("revision", metavar="REV", help="commit, branch or tag")
    for part, what in {
        "data": "what *.dvc files name",
        "checkpoints": "weights, card, and all that the pipeline makes",
        "all": "both, and every file in Git but DVC's settings; the default",
    }.items():
        command.add_argument(
            f"--{part}", action="append_const", dest="parts", const=part, help=what
        )
    command.set_defaults(run=lambda args: show_to(args.revision, args.parts or ["all"]))
    command = commands.add_parser("undo", help="take the last rollback back; again: repeat it")
    command.set_defaults(run=lambda args: show_undo())
    command = commands.add_parser("diff", help="what changed between two versions")
    command.add_argument("a", metavar="A")
    command.add_argument("b", metavar="B", nargs="?", default="HEAD", help="default: HEAD")
    command.set_defaults(run=lambda args: show_diff(args.a, args.b))
    command = commands.add_parser("verify", help="evaluate weights and compare with their card")
    command.add_argument(
        "weights", type=Path, nargs="?", help=f"default: {WEIGHTS} of the repository"
    )
    command.add_argument(
        "--data", type=Path, metavar="ROOT", help="default: what they were trained on"
    )
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--tolerance", type=float, default=0.0, metavar="POINTS", help="of top-1, default: 0"
    )
    command.set_defaults(
        run=lambda args: show_verify(args.weights, args.data, args.device, args.tolerance)
    )
    args = parser.parse_args(argv)
    assert set(PARTS) == {"data", "checkpoints", "all"}
    return exit_code(lambda: int(args.run(args)), "stopped; nothing is half restored")


def show_list(most: int) -> int:
    """A row for each version; ``*`` marks the one in the working tree."""
    with opened(Path.cwd()) as repository:
        found = versions(repository, most)
    rows = [["", "revision", "date", "data", "files", "top-1", "MB", "recipe", "subject"]]
    rows += [row(version) for version in found]
    print("\n".join(aligned(rows)))
    return EXIT_OK


def row(version: Version) -> list[str]:
    """Cells of one version."""
    trained = ["-", "-", "-"]
    if version.card is not None:
        metrics, weights = version.card.get("metrics", {}), version.card.get("weights", {})
        trained = [
            f"{metrics['top1']:.2f}" if "top1" in metrics else "-",
            f"{weights.get('size', 0) / 1e6:.1f}",
            Path(str(metrics.get("run", "-"))).name,
        ]
    data = "+".join(output.digest for output in version.data) or "-"
    files = sum(output.entry.get("nfiles", 1) for output in version.data)
    here = "*" if version.is_here else ""
    return [here, version.commit[:8], version.date, data, f"{files:,}", *trained, version.subject]


def show_to(revision: str, parts: Sequence[str]) -> int:
    """Restore, and say what."""
    with opened(Path.cwd()) as repository:
        return tell(roll_back(repository, revision, parts), f"as in {revision}")


def show_undo() -> int:
    """Restore what was before, and say what."""
    with opened(Path.cwd()) as repository:
        return tell(undo(repository), "as before")


def tell(done: Done, how: str) -> int:
    """What was done and what to type next."""
    if not done.files and not done.outputs:
        print("nothing to do: it is all there")
        return EXIT_OK
    for name in done.outputs:
        print(f"gone, `dvc repro` makes it: {name}" if name in done.absent else f"{how}: {name}")
    print(f"{how}: {len(done.files):,} files in Git, staged: `git commit` keeps this, "
          "`python scripts/rollback.py undo` takes it back")  # fmt: skip
    return EXIT_OK


def show_diff(a: str, b: str) -> int:
    """Files by folder, then keys with both values."""
    with opened(Path.cwd()) as repository:
        found = difference(repository, repository.commit(a), repository.commit(b))

    def count(counts: Counts) -> str:
        parts = {"added": counts.added, "removed": counts.removed, "changed": counts.changed}
        return ", ".join(f"{len(names):,} {what}" for what, names in parts.items() if names)

    print("data:" if found.folders else "data: the same")
    for folder in list(found.folders)[:MOST_FOLDERS]:
        print(f"  {folder}: {count(found.folders[folder])}")
    if (more := len(found.folders) - MOST_FOLDERS) > 0:
        print(f"  and {more:,} more folders")
    for part, keys in found.cards.items():
        print(f"{part}:" if keys else f"{part}: the same")
        for key, values in keys.items():
            print(f"  {key}: {' -> '.join(shown(value) for value in values)}")
    return EXIT_OK


def shown(value: Any) -> str:
    """A value, short enough for a line."""
    text = "absent" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def show_verify(weights: Path | None, data: Path | None, device: str, tolerance: float) -> int:
    """Both figures; 1 when they differ."""
    from lockstep.versions.verify import verify  # imports torch

    weights, data = (path and path.absolute() for path in (weights, data))
    with suppress(UserError):  # weights may lie outside of any repository
        beside = Path.cwd() if weights is None else weights.parent
        os.chdir(Repository.find(beside).root)  # where their data.root begins
    verdict = verify(weights or Path(WEIGHTS), data=data, device=device)
    for note in verdict.now.notes:
        print(note, file=sys.stderr)
    metrics = verdict.card["metrics"]
    print(
        f"card  top-1 {metrics['top1']:.2f} % (step {metrics['step']:,}, "
        f"data {verdict.card['data']['val'][:8]})"
    )
    print(f"now   {verdict.now.text()}")
    same = verdict.difference <= tolerance
    print("equal" if same else f"different, by {verdict.difference:.2f} points")
    return EXIT_OK if same else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
