"""scripts/prepare_data.py; what its ``check`` finds is tested in test_check.py."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    variables = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables)


def test_digits_twice(tmp_path: Path) -> None:
    first, second = run("digits", "--root", tmp_path), run("digits", "--root", tmp_path)
    assert (first.returncode, first.stdout) == (0, f"{tmp_path / 'digits'}: made\n")
    assert (second.returncode, second.stdout) == (0, f"{tmp_path / 'digits'}: complete\n")


def test_check_of_a_good_set(image_root: Path, tmp_path: Path) -> None:
    done = run("check", image_root, "--json", tmp_path / "new/data.json")
    assert done.returncode == 0 and done.stderr == ""
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert done.stdout.isascii() and max(map(len, lines)) <= 100
    cells = {line[:22].strip(): line[22:].split() for line in lines}
    assert cells["images"] == ["23", "7"] and cells["unreadable"] == ["0", "0"]
    assert cells["formats"] == ["PNG", "23", "PNG", "7"]
    assert cells["short side, px"] == ["18", "19", "24", "29", "30", "20", "20", "23", "26", "26"]
    assert cells["smallest class"] == ["7", "class2", "2", "class1"]
    assert cells["in an earlier split"] == ["-", "7"]
    starts = {line.rindex("  ") for line in lines if line.startswith(("images", "classes"))}
    assert len(starts) == 1, "aligned"
    train, val = json.loads((tmp_path / "new/data.json").read_text())
    assert train["split"] == "train" and train["counts"] == {"class0": 8, "class1": 8, "class2": 7}
    assert train["unreadable"] == {} and len(train["digest"]) == 32
    assert val["leaked"]["count"] == 7
    assert "warning: val: LEAKAGE, also in train byte for byte: 7" in lines
    assert "    val/class0/00.png = train/class0/00.png" in lines


def test_check_names_the_unreadable(image_root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(image_root, tmp_path / "bad")
    (root / "val/class1/01.png").write_bytes(b"")
    done = run("check", root)
    assert done.returncode == 2
    assert "unreadable: val/class1/01.png: the file is empty" in done.stdout


def test_check_shows_any_name_on_any_terminal(image_root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(image_root, tmp_path / "odd")
    for name in (b"\xff.png", "猫[bold].png".encode(), b"a\x1b[2Jb\nc.png"):
        (root / "train/class0" / os.fsdecode(name)).write_bytes(b"")
    for split in ("train", "val"):
        (root / split / "class2").rename(root / split / "猫")
    done = run("check", root, PYTHONIOENCODING="utf-8")
    assert done.returncode == 2 and done.stderr == ""
    for name in (r"\xff.png", "猫[bold].png", r"a\x1b[2Jb\nc.png"):
        assert f"unreadable: train/class0/{name}: the file is empty" in done.stdout
    assert "7  猫" in done.stdout
    done = run("check", root, PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and done.stderr == ""
    assert r"unreadable: train/class0/\u732b[bold].png: the file" in done.stdout


def test_check_makes_a_contact_sheet(image_root: Path, tmp_path: Path) -> None:
    root = shutil.copytree(image_root, tmp_path / "bad")
    (root / "val/class1/01.png").write_bytes(b"")
    for sheet in ("a.png", "b.png"):
        assert run("check", root, "--sheet", tmp_path / sheet).returncode == 2
    with Image.open(tmp_path / "a.png") as page:
        red = [count for count, colour in page.getcolors(1 << 24) if colour == (190, 30, 30)]
        assert page.size == (1274, 26 + 3 * 134) and 0.8 * 128**2 < sum(red) < 128**2
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_check_shows_progress_on_a_terminal(image_root: Path) -> None:
    terminal, inside = pty.openpty()
    command = [sys.executable, str(SCRIPT), "check", str(image_root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=inside, check=True)
    os.close(inside)
    shown = os.read(terminal, 1 << 20).decode()
    os.close(terminal)
    assert "of 30 images" in shown and b"of 30" not in done.stdout


@pytest.mark.parametrize("option", ["--json", "--sheet"])
def test_check_says_first_that_it_cannot_write(
    image_root: Path, tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").write_text("")
    done = run("check", image_root, option, tmp_path / "file/new")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: {tmp_path / 'file/new'} cannot be written: ")


@pytest.mark.parametrize("before", [None, "old"])
def test_check_that_fails_leaves_files_as_they_were(tmp_path: Path, before: str | None) -> None:
    findings = tmp_path / "data.json"
    if before is not None:
        findings.write_text(before)
    assert run("check", tmp_path, "--json", findings).returncode == 2
    assert (findings.read_text() if findings.exists() else None) == before


def test_check_refuses_what_is_no_data_set(tmp_path: Path) -> None:
    done = run("check", tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: data.root = {tmp_path}: ")
    assert "Traceback" not in done.stderr
