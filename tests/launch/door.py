"""``train.py`` with the stub worker and a made-up plan: ``python door.py RUN_ROOT OVERRIDES...``."""

from __future__ import annotations

import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

from lockstep.config.bind import bind
from lockstep.config.plan import DataFacts, Machine, ModelFacts, make_plan
from lockstep.launch import launch
from lockstep.launch.env import join

CONF = Path(__file__).resolve().parents[2] / "conf"


def main() -> int:
    root, *overrides = sys.argv[1:]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = bind(compose("config", [f"run.root={root}", "device=cpu", *overrides]))
    joined = join(config)
    described = joined.describe(config) if joined else config
    plan = make_plan(
        described,
        Machine(num_gpus=0, cores=2, gpu_memory_bytes=None),
        DataFacts(num_train=640, num_val=64, num_classes=10),
        ModelFacts(parameters=10, forward_flops=10, activation_bytes=10, has_batchnorm=False),
    )
    return launch(config, "stub", worker="tests.launch.stub_worker", plan=plan)


if __name__ == "__main__":
    sys.exit(main())
