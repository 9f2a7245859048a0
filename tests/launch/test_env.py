from __future__ import annotations

from functools import cache

import pytest
from hydra import compose, initialize_config_dir

from lockstep.config.bind import bind
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.launch.env import expand_counts, first_host, join
from tests.conftest import REPOSITORY

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "one", "MASTER_PORT": "7",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "1", "SLURM_PROCID": "5", "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "6", "SLURM_NODEID": "2", "SLURM_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[08-10]",
}  # fmt: skip


@cache
def config(*overrides: str) -> Config:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return bind(compose("config", list(overrides)))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},
        SRUN | {"SLURM_NTASKS": "1"},
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"},
    ],
    ids=["nobody", "sbatch", "one task", "batch script"],
)
def test_nobody_started_a_group(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert join(config(), environ) is None
    assert environ == before


def test_torchrun() -> None:
    joined = join(config(), dict(TORCHRUN))
    assert joined is not None
    assert (joined.rank, joined.world_size, joined.local_world_size) == (3, 4, 2)
    launch = joined.describe(config()).launch
    assert (launch.nodes, launch.processes, launch.rendezvous) == (2, 2, "one:7")


def test_a_kubernetes_job_has_one_process_a_pod() -> None:
    environ = {k: v for k, v in TORCHRUN.items() if not k.startswith("LOCAL")}
    joined = join(config(), environ)
    assert joined is not None and joined.describe(config()).launch.nodes == 4
    assert (environ["LOCAL_RANK"], environ["LOCAL_WORLD_SIZE"]) == ("0", "1")


def test_srun_is_translated() -> None:
    environ = dict(SRUN)
    joined = join(config(), environ)
    assert joined is not None and joined.describe(config()).launch.nodes == 3
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environ[n] for n in names] == ["5", "6", "1", "2", "gpu08", str(10_000 + 31 * 41 + 1)]


def test_srun_may_start_agents_instead() -> None:
    assert join(config("launch.nodes=2", "launch.rendezvous=one:7"), dict(SRUN)) is None


def test_what_the_user_exported_stays() -> None:
    environ = SRUN | {"MASTER_PORT": "99"}
    joined = join(config(), environ)
    assert joined is not None and joined.port == "99"


@pytest.mark.parametrize(
    ("visible", "one_each", "local_rank"), [("3", True, "0"), ("0,1", False, "1"), ("", False, "1")]
)
def test_a_process_that_is_shown_its_own_gpu_alone(
    visible: str, one_each: bool, local_rank: str
) -> None:
    environ = SRUN | {"CUDA_VISIBLE_DEVICES": visible}
    joined = join(config(), environ)
    assert joined is not None and joined.one_gpu_each is one_each
    assert environ["LOCAL_RANK"] == local_rank


@pytest.mark.parametrize(
    ("change", "overrides", "message"),
    [
        ({"MASTER_ADDR": ""}, (), "not MASTER_ADDR"),
        ({}, ("launch.processes=3",), "launch.processes = 3 x launch.nodes = 1, but"),
        ({"LOCAL_WORLD_SIZE": "3"}, (), "the same number of processes on every node"),
    ],
)
def test_contradictions(change: dict[str, str], overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        joined = join(config(*overrides), TORCHRUN | change)
        assert joined is not None
        joined.describe(config(*overrides))


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node", "node"),
        ("node[08-10,3],other", "node08"),
        ("a-1,b-2", "a-1"),
        ("rack[1-2]n[3,4]", "rack1n3"),
    ],
)
def test_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize(
    ("text", "counts"), [("2", [2]), ("2(x3),1", [2, 2, 2, 1]), ("1,4(x2)", [1, 4, 4])]
)
def test_expand_counts(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts
