"""Measure what checkpoints and lost processes cost.

python scripts/bench_faults.py stall [OVERRIDES ...]    # time lost to saves, none / behind / waiting
python scripts/bench_faults.py kill  [OVERRIDES ...]    # kill -9 of a worker: seconds to the next new step

The overrides are those of train.py. Runs are written below --folder and judged by compare_runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.errors import EXIT_FAILURE, EXIT_OK, UserError, exit_code
from lockstep.telemetry.compare import compare_runs
from lockstep.telemetry.files import read_records
from lockstep.telemetry.phases import read_phases

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
_SKIPPED = 20
"""First steps of a process: compilation, warm-up, first pages of memory."""
_FIRST = 10
"""Steps after a save that show what it takes from the loop; the whole interval is noisier."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write JSON; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["stall", "kill"])
    parser.add_argument("overrides", nargs="*", help="of train.py")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench_faults"))
    parser.add_argument("--interval", type=int, default=100, help="stall: steps between saves")
    parser.add_argument("--saves", type=int, default=3, help="stall: how many")
    parser.add_argument("--modes", default="none,behind,waiting", help="stall: which of these")
    parser.add_argument("--at", type=int, default=30, help="kill: after this step")
    parser.add_argument("--rank", type=int, default=0, help="kill: this one")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="kill: of compare_runs")
    parser.add_argument("--json", type=Path, help="append the result as one line here")
    args = parser.parse_intermixed_args(argv)
    return exit_code(lambda: measure(args))


def measure(args: argparse.Namespace) -> int:
    result = stall(args) if args.what == "stall" else kill(args)
    result |= {"what": args.what, "overrides": args.overrides, "host": platform.machine()}
    if args.json is not None:
        with args.json.open("a") as file:
            file.write(json.dumps(result) + "\n")
    return EXIT_OK if result["ok"] else EXIT_FAILURE


def stall(args: argparse.Namespace) -> dict[str, Any]:
    """Compare the time of the same steps without saves, with saves behind, and with waiting."""
    steps = args.interval * (args.saves + 1)
    modes = {
        "none": ["checkpoint.every_steps=null"],
        "behind": [f"checkpoint.every_steps={args.interval}", "checkpoint.async=true"],
        "waiting": [f"checkpoint.every_steps={args.interval}", "checkpoint.async=false"],
    }
    rows: dict[str, dict[str, Any]] = {}
    for mode, overrides in modes.items():
        if mode not in args.modes.split(","):
            continue
        run = args.folder / f"stall-{mode}"
        train(args, run, f"steps={steps}", *overrides)
        times = step_times(run)
        gaps = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
        usual = median(gap for step, gap in gaps.items() if step > _SKIPPED)
        saves = range(args.interval, steps, args.interval)
        rows[mode] = {
            "step_ms": 1000 * usual,
            "interval_ms": [lost_ms(gaps, usual, save, args.interval) for save in saves],
            "first_ms": [lost_ms(gaps, usual, save, _FIRST) for save in saves],
        }
    checkpoint = newest_bytes(args.folder / f"stall-{args.modes.split(',')[-1]}")
    print(f"checkpoint of {checkpoint / 1e9:.2f} GB, every {args.interval} steps, n = {args.saves}")
    print(f"{'saves':<8} {'ms/step':>8} {'lost, of the interval':>22}  ms lost in an interval")
    print(f"{'':<8} {'':>8} {'10 steps':>10} {'all steps':>11}  that begins with a save")
    for mode, row in rows.items():
        for key in ("first", "interval"):
            row[f"{key}_share"] = median(row[f"{key}_ms"]) / (args.interval * row["step_ms"])
        text = ", ".join(f"{x:.1f}" for x in row["interval_ms"])
        print(
            f"{mode:<8} {row['step_ms']:>8.2f} {row['first_share']:>10.2%} "
            f"{row['interval_share']:>11.2%}  {text}"
        )
    return {"rows": rows, "checkpoint_bytes": checkpoint, "interval": args.interval, "ok": True}


def lost_ms(gaps: dict[int, float], usual: float, save: int, num_steps: int) -> float:
    """Milliseconds that so many steps from a save on take beyond the usual."""
    return 1000 * sum(gaps[step] - usual for step in range(save + 1, save + num_steps + 1))


def kill(args: argparse.Namespace) -> dict[str, Any]:
    """Kill a worker in the middle; the run goes on by itself and must be the undisturbed one."""
    quiet, disturbed = args.folder / "kill-undisturbed", args.folder / "kill-disturbed"
    train(args, quiet)
    process = start(args, disturbed, "launch.max_restarts=3")
    wait_for(lambda: newest_step(disturbed) >= args.at, process)
    pid = next(p.pid for p in read_phases(disturbed / "logs") if p.rank == args.rank)
    before = newest_step(disturbed)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: any(t > killed + 0.5 for t in step_times(disturbed).values()), process)
    back = min(t for t in step_times(disturbed).values() if t > killed + 0.5) - killed
    wait_for(lambda: newest_step(disturbed) > before, process)
    new = step_times(disturbed)[before + 1] - killed
    if process.wait() != EXIT_OK:
        raise UserError(f"the killed run ended with exit code {process.returncode}")
    found = compare_runs(quiet, disturbed, tolerance=args.tolerance)
    print(
        f"rank {args.rank} killed after step {before}: first step again after {back:.1f} s, first "
        f"new step after {new:.1f} s; {found.text()}"
    )
    return {
        "killed_after_step": before,
        "seconds_to_first_step": back,
        "seconds_to_first_new_step": new,
        "comparison": found.text(),
        "ok": found.parting is None,
    }


def train(args: argparse.Namespace, run: Path, *overrides: str) -> None:
    """Train to the end."""
    if (code := start(args, run, *overrides).wait()) != EXIT_OK:
        raise UserError(f"train.py ended with exit code {code}")


def start(args: argparse.Namespace, run: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """``train.py`` in ``run``, which must not exist yet."""
    if run.exists():
        raise UserError(f"{run} is there already: remove it, or choose another --folder")
    place = [f"run.root={run.parent}", f"run.name={run.name}", "telemetry.console_seconds=30"]
    return subprocess.Popen([sys.executable, str(TRAIN), *args.overrides, *overrides, *place])


def step_times(run: Path) -> dict[int, float]:
    """When each step was queued, seconds since the epoch."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return {}
    return {r["step"]: r["time"] for r in read_records(path) if r["kind"] == "step"}


def newest_step(run: Path) -> int:
    return max(step_times(run), default=0)


def newest_bytes(run: Path) -> int:
    """Size of the newest checkpoint."""
    return sum(p.stat().st_size for p in (run / "checkpoints" / "latest").resolve().iterdir())


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        if process.poll() is not None:
            raise UserError(f"the run ended too early, exit code {process.returncode}")
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
