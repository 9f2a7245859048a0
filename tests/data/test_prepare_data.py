"""scripts/prepare_data.py and the reading through behind its ``check``."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.data.check import check
from lockstep.errors import UserError

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_digits_twice(tmp_path: Path) -> None:
    first, second = run("digits", "--root", tmp_path), run("digits", "--root", tmp_path)
    assert (first.returncode, first.stdout) == (0, f"{tmp_path / 'digits'}: made\n")
    assert (second.returncode, second.stdout) == (0, f"{tmp_path / 'digits'}: complete\n")


def test_check_of_a_good_set(image_root: Path) -> None:
    done = run("check", image_root)
    assert done.returncode == 0 and done.stderr == ""
    assert "train: 23 images, 3 classes, 0 unreadable" in done.stdout
    assert "val: 7 images" in done.stdout


def test_check_names_the_unreadable(image_root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(image_root, tmp_path / "bad")
    (root / "val/class1/01.png").write_bytes(b"")
    done = run("check", root)
    assert done.returncode == 2
    assert "unreadable: val/class1/01.png: the file is empty" in done.stdout


def test_check_refuses_what_is_no_data_set(tmp_path: Path) -> None:
    done = run("check", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: data.root = {tmp_path}: ")
    assert "Traceback" not in done.stderr


def test_report(image_root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(image_root, tmp_path / "bad")
    (root / "train/class2/02.png").unlink()
    (root / "train/class2/02.png").symlink_to("gone")
    train, val = check(root)
    assert train.split == "train" and train.counts == {"class0": 8, "class1": 8, "class2": 7}
    assert train.unreadable == {"class2/02.png": "No such file or directory"}
    assert val.unreadable == {} and sum(val.counts.values()) == 7
    shutil.rmtree(root / "val/class0")
    with pytest.raises(UserError, match="class0"):
        check(root)
