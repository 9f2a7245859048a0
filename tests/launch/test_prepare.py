"""Facts about the machine."""

from __future__ import annotations

import pytest

from lockstep.launch.prepare import joined_by_nvlink, machine

NVLINK = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tSYS\t X

Legend:

  X    = Self
"""


@pytest.mark.parametrize(
    "topology, joined",
    [
        pytest.param(NVLINK, True, id="all"),
        pytest.param(NVLINK.replace("NV18", "PHB"), False, id="none"),
        pytest.param(NVLINK.replace("X \tNV18", "X \tSYS"), False, id="one pair is not"),
        pytest.param("", None, id="not told"),
        pytest.param("GPU0\t X \t0-31\t0", None, id="one GPU"),
    ],
)
def test_nvlink(topology: str, joined: bool | None) -> None:
    assert joined_by_nvlink(topology) is joined


def test_this_machine() -> None:
    here = machine()
    assert here.cores > 0
    assert here.host_memory_bytes is not None and here.host_memory_bytes > 2**28
