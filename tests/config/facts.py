"""Plain facts about machines, data and models, and the plans that are made of them."""

from __future__ import annotations

from dataclasses import replace

from lockstep.config.plan import GIB, DataFacts, Machine, ModelFacts, Plan, make_plan
from tests.runs import configure

CPU = Machine(num_gpus=0, cores=4, gpu_memory_bytes=None)
EIGHT = Machine(num_gpus=8, cores=64, gpu_memory_bytes=80 * GIB)
ONE = replace(EIGHT, num_gpus=1)
DATA = DataFacts(num_train=1000, num_val=100, num_classes=10)
MODEL = ModelFacts(
    parameters=1_000_000,
    forward_flops=10**9,
    activation_bytes=10**6,
    has_batchnorm=False,
    checkpointed_bytes=10**5,
    block_parameters=80_000,
    blocks=12,
)
BATCHNORM = replace(MODEL, has_batchnorm=True)


def plan(
    *overrides: str, machine: Machine = CPU, data: DataFacts = DATA, model: ModelFacts = MODEL
) -> Plan:
    return make_plan(configure(*overrides), machine, data, model)


def gpus(number: int, gib: float, *, nvlink: bool = True, host: int = 1024) -> Machine:
    return Machine(number, 64, int(gib * GIB), host * GIB, nvlink if number > 1 else None)
