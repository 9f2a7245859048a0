"""Make a data set, or read one through.

python scripts/prepare_data.py digits
python scripts/prepare_data.py cifar10 --root data
python scripts/prepare_data.py check /path/to/images
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from lockstep.errors import EXIT_OK, EXIT_USER_ERROR, UserError


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, what in {
        "digits": "1,797 handwritten digits, no download",
        "cifar10": "60,000 images of 32 px, 170 MB download",
        "imagenette": "13,394 images of ten ImageNet classes, short side 320 px, 340 MB download",
    }.items():
        command = commands.add_parser(name, help=what)
        command.add_argument("--root", type=Path, default=Path("data"), help="default: data")
        command.set_defaults(run=lambda args, name=name: make(name, args.root))
    command = commands.add_parser("check", help="decode every image and name the unreadable")
    command.add_argument("root", type=Path, help="folder that holds train and val")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the findings there, too")
    command.set_defaults(run=lambda args: check(args.root, args.json))
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR


def make(name: str, root: Path) -> int:
    """Make ``<root>/<name>`` unless it is there."""
    if name == "digits":
        from lockstep.data.digits import write_digits

        made = write_digits(root)
    else:
        from lockstep.data.download import download

        made = download(name, root)
    print(f"{root / name}: {'made' if made else 'complete'}")
    return EXIT_OK


def check(root: Path, to: Path | None) -> int:
    """Print what a data set holds, and write it as JSON; 2 when an image cannot be read."""
    from lockstep.data.check import check as read_through

    reports = read_through(root)
    for report in reports:
        bad = len(report.unreadable)
        print(
            f"{report.split}: {sum(report.counts.values()):,} images, {len(report.counts):,} "
            f"classes, {bad:,} unreadable, digest {report.digest}"
        )
        for name, count in report.counts.items():
            print(f"  {count:>9,}  {name}")
        for name, reason in report.unreadable.items():
            print(f"  unreadable: {report.split}/{name}: {reason}")
    if to is not None:
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_text(json.dumps([asdict(report) for report in reports], indent=2) + "\n")
    return EXIT_USER_ERROR if any(report.unreadable for report in reports) else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
