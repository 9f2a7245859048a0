"""Pretends to be the training of one job, for tests of sweeps; starts in milliseconds.

It takes ten steps and evaluates after each: top-1 is ``seed`` times the step. A signal stops it
between two steps. ``STUB`` says otherwise: ``fail:SEED`` fails that seed once, ``wait:SEED`` keeps
it at step 3 until it is stopped or a file ``go`` lies in ``run.root``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

STEPS = 10

args = dict(a.lstrip("+").split("=", 1) for a in sys.argv[1:] if "=" in a)
root = Path(args["run.root"])
run = root / args["run.name"].strip("'")
seed = int(args["seed"])
action, _, which = os.environ.get("STUB", "").partition(":")
chosen = which == str(seed)
stopped = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: stopped.append(number))


def write(name: str, text: str) -> None:
    with (run / name).open("a") as file:
        file.write(text + "\n")


run.mkdir(parents=True, exist_ok=True)
(root / "now").mkdir(exist_ok=True)
me = root / "now" / str(os.getpid())
gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
me.write_text(gpu)
peers = [p for p in (root / "now").iterdir() if Path(f"/proc/{p.name}").exists()]
write("starts", json.dumps({
    "peers": len(peers), "gpu": gpu, "others": [p.read_text() for p in peers if p != me],
    "group": os.environ.get("WANDB_RUN_GROUP"), "cores": len(os.sched_getaffinity(0)),
}))  # fmt: skip
print("the stub speaks", flush=True)
if action == "fail" and chosen and not (run / "failed").exists():
    (run / "failed").touch()
    print("no such luck", file=sys.stderr)
    me.unlink()
    sys.exit(1)
(run / "plan.json").write_text(json.dumps({"total_steps": STEPS}))
done = len((run / "steps").read_text().split()) if (run / "steps").exists() else 0
for step in range(done + 1, STEPS + 1):
    while action == "wait" and chosen and step == 4 and not stopped and not (root / "go").exists():
        (run / "waiting").touch()
        time.sleep(0.01)
    time.sleep(0.03)
    if stopped:
        me.unlink()
        sys.exit(85)
    figures = {"top1": float(seed * step), "top5": 0.0, "loss": 1.0 / seed}
    write("steps", str(step))
    write("metrics.jsonl", json.dumps({"kind": "eval", "step": step, "weights": "raw"} | figures))
(run / "DONE").write_text(json.dumps({"step": STEPS} | figures))
me.unlink()
