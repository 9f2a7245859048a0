"""Exported weights are timm's own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from lockstep.checkpoint.export import card_path, export_weights, git_revision, read_card
from lockstep.errors import UserError
from tests.checkpoint.test_manifest import file_size_limit, flip_bit

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": (
        "vit_tiny_patch16_224",
        {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 3},
    ),
    "resnet": ("resnet18", {"channels": (8, 8, 8, 8)}),
}


@pytest.mark.parametrize("name, arguments", MODELS.values(), ids=MODELS)
def test_timm_loads_what_was_exported(tmp_path: Path, name: str, arguments: dict[str, Any]) -> None:
    arguments = arguments | {"num_classes": 5}
    torch.manual_seed(1)
    model = timm.create_model(name, **arguments).eval()
    path = tmp_path / "model.safetensors"
    export_weights(
        dict(model.to(memory_format=torch.channels_last).state_dict()), path, card={"top1": 97.5}
    )
    torch.manual_seed(2)
    loaded = timm.create_model(name, checkpoint_path=str(path), **arguments).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), model.to(memory_format=torch.contiguous_format)(images))


def test_tied_strided_and_parameter_tensors(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    state = {
        "tied.a": base,
        "tied.b": base,
        "row": base[1],
        "transposed": base.t(),
        "half": base.half(),
        "scalar": torch.tensor(3),
        "empty.a": torch.empty(0),
        "empty.b": torch.empty(0, 2),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "model.safetensors"
    export_weights(state, path, card={})
    loaded = load_file(path)
    assert loaded.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype


@pytest.mark.parametrize("given", ["model.safetensors", "model.json"])
def test_card(tmp_path: Path, given: str) -> None:
    path = tmp_path / "new" / "model.safetensors"
    card = {"recipe": {"seed": 0}, "classes": ["Käse", "日本"], "metrics": {"top1": 97.5}}
    export_weights({"w": torch.ones(2)}, path, card=card)
    read = read_card(path.parent / given)
    weights = read.pop("weights")
    assert read == card
    assert weights["file"] == "model.safetensors" and weights["num_tensors"] == 1
    assert weights["size"] == path.stat().st_size
    assert {p.name for p in path.parent.iterdir()} == {"model.safetensors", "model.json"}


@pytest.mark.parametrize(
    "damage, message",
    [
        pytest.param(lambda p: card_path(p).unlink(), "no card", id="no card"),
        pytest.param(lambda p: card_path(p).write_text("{"), "not a card", id="torn card"),
        pytest.param(lambda p: card_path(p).write_text("[]"), "not a card", id="a list"),
        pytest.param(lambda p: card_path(p).write_text("{}"), "not a card", id="another JSON"),
        pytest.param(flip_bit, "not the weights that model.json describes", id="other weights"),
        pytest.param(lambda p: p.unlink(), "cannot be read", id="no weights"),
    ],
)
def test_a_card_that_does_not_hold(tmp_path: Path, damage: Any, message: str) -> None:
    path = tmp_path / "model.safetensors"
    export_weights({"w": torch.ones(2)}, path, card={})
    damage(path)
    with pytest.raises(UserError, match=message):
        read_card(path)


def test_others_may_read_what_was_exported(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export_weights({"w": torch.ones(2)}, tmp_path / "model.safetensors", card={})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


def test_a_full_disk_keeps_the_earlier_export(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    export_weights({"w": torch.ones(2)}, path, card={"top1": 1.0})
    with file_size_limit(1000), pytest.raises(UserError, match="cannot write"):
        export_weights({"w": torch.ones(5000)}, path, card={"top1": 2.0})
    assert read_card(path)["top1"] == 1.0
    assert {p.name for p in tmp_path.iterdir()} == {"model.safetensors", "model.json"}


def test_no_room_for_the_card_leaves_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with file_size_limit(1000), pytest.raises(UserError, match="cannot write"):
        export_weights({"w": torch.ones(2)}, path, card={"long": "x" * 2000})
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_is_named_is_read(tmp_path: Path) -> None:
    """Not the one of the same folder that the card names."""
    path, copy = tmp_path / "model.safetensors", tmp_path / "copy.safetensors"
    export_weights({"w": torch.ones(2)}, path, card={})
    shutil.copy(card_path(path), card_path(copy))
    copy.write_bytes(path.read_bytes()[:20])
    with pytest.raises(UserError, match=r"copy\.safetensors: not the weights"):
        read_card(copy)
    shutil.copy(path, copy)
    assert read_card(copy)["weights"]["file"] == path.name


def test_git_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    repository = tmp_path / "repository"
    repository.mkdir()
    assert git_revision(repository) is None
    assert git_revision(tmp_path / "absent") is None

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(
            ["git", *identity, *arguments], cwd=repository, check=True, capture_output=True
        )

    git("init")
    assert git_revision(repository) is None, "no commit yet"
    (repository / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = git_revision(repository)
    assert clean is not None and len(clean["revision"]) == 40 and clean["dirty"] is False
    (repository / "file").write_text("2")
    assert git_revision(repository) == clean | {"dirty": True}
    assert json.dumps(clean)
    monkeypatch.setenv("PATH", "")
    assert git_revision(repository) is None, "no git"
