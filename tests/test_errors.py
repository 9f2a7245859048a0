"""What becomes of a command whose output nobody reads, or that cannot be written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment

PRINTS = "print('a line ' * 9999); return_ = 0"
BREAKS = "import os; r, w = os.pipe(); os.close(r); os.write(w, b'x'); return_ = 0"


def ended(body: str, redirection: str) -> subprocess.CompletedProcess[str]:
    """Of a script whose work is ``body``."""
    lines = "\n    ".join(body.split("; "))
    program = (
        "import sys\nfrom lockstep.errors import exit_code, tell\n"
        f"def run():\n    {lines}\n    return return_\nsys.exit(exit_code(run))\n"
    )
    return subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {redirection}', sys.executable, program],
        env=clean_environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "body, redirection, code, told",
    [
        pytest.param(PRINTS, "| head -0; exit ${PIPESTATUS[0]}", 141, "", id="a pipe that ends"),
        pytest.param(PRINTS, ">/dev/full", 2, "error: the output cannot be written: No space left", id="full"),
        pytest.param(PRINTS, ">&-", 0, "", id="closed"),
        pytest.param(PRINTS, "", 0, "", id="read"),
        pytest.param(BREAKS, "", 1, "Traceback", id="another pipe"),
        pytest.param("tell('x', sys.stdout); return_ = 3", ">/dev/full", 3, "", id="told to nobody"),
        pytest.param("tell('x', sys.stderr); return_ = 3", "2>&-", 3, "", id="told to none"),
    ],
)  # fmt: skip
def test_output_that_is_not_read(body: str, redirection: str, code: int, told: str) -> None:
    done = ended(body, redirection)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(told) and bool(done.stderr) == bool(told)


def test_a_run_outlives_its_log(tmp_path: Path) -> None:
    words = "experiment=digits model.kwargs.depth=1 model.kwargs.embed_dim=16 steps=3"
    done = subprocess.run(
        ["bash", "-c", f'"$0" train.py {words} run.root={tmp_path} run.name=x >/dev/full 2>&1', sys.executable],
        env=clean_environment(), timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "x/DONE").exists()
