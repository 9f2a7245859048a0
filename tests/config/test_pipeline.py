"""From params.yaml to the resolved configuration that DVC tracks."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.config.bind import fingerprint, law, load_config, save_config
from lockstep.config.pipeline import content_digest, read_params, resolve
from lockstep.errors import UserError
from tests.conftest import REPOSITORY
from tests.runs import configure

CONF = REPOSITORY / "conf"


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "code"
    (folder / "room").mkdir(parents=True)
    (folder / "room/a.py").write_text("a")
    (folder / "b.py").write_text("b")
    (tmp_path / "train.py").write_text("c")
    return [folder, tmp_path / "train.py"]


def params(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return path


def test_the_committed_params_are_the_digits_experiment(inputs: list[Path]) -> None:
    config = resolve(CONF, REPOSITORY / "params.yaml", inputs)
    assert law(config) == law(configure("experiment=digits"))
    begin = f"digits-vit_digits-auto-{fingerprint(config)}-"
    assert config.run.name == begin + content_digest(inputs)


def test_choices_and_overrides(tmp_path: Path, inputs: list[Path]) -> None:
    text = 'train: {model: resnet18, experiment: null, overrides: ["model.kwargs.a=1", "seed=3"]}'
    config = resolve(CONF, params(tmp_path, text), inputs)
    assert config.seed == 3 and config.model.kwargs == {"a": 1}
    assert config.run.name is not None and config.run.name.startswith("digits-resnet18-auto-")


def test_another_model_takes_the_place_of_the_experiments(
    tmp_path: Path, inputs: list[Path]
) -> None:
    """What ``dvc exp run -S train.model=resnet50`` does."""
    text = (REPOSITORY / "params.yaml").read_text().replace("vit_digits", "resnet50")
    config = resolve(CONF, params(tmp_path, text), inputs)
    assert (config.model.name, config.model.kwargs) == ("resnet50", {})
    assert config.epochs == configure("experiment=digits").epochs


def test_packed_images(tmp_path: Path, inputs: list[Path]) -> None:
    packed, *others = inputs
    config = resolve(CONF, REPOSITORY / "params.yaml", others, packed=packed)
    assert (config.data.source, config.data.root) == ("packed", str(packed))
    same = resolve(CONF, REPOSITORY / "params.yaml", [*others, packed])
    assert config.run.name == same.run.name, "where images lie is no part of the recipe"
    path = params(tmp_path, "train: {overrides: [data.source=folder, data.root=mine]}")
    config = resolve(CONF, path, others, packed=packed)
    assert (config.data.source, config.data.root) == ("folder", "mine")


def test_the_file_repeats_the_run(tmp_path: Path, inputs: list[Path]) -> None:
    config = resolve(CONF, REPOSITORY / "params.yaml", inputs)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("other: {}", "expected a section train", id="no section"),
        pytest.param("train: {model: vit}", "overrides", id="no overrides"),
        pytest.param("train: [", "expected a section train", id="no YAML"),
        pytest.param("[1]", "expected a section train", id="no mapping"),
        pytest.param("train: {overrides: seed=1}", "must be a list", id="no list"),
        pytest.param("train: {overrides: [1]}", "must be a list", id="no words"),
        pytest.param(
            "train: {model: vit_tny, overrides: []}", "did you mean vit_tiny", id="option"
        ),
        pytest.param("train: {overrides: [sed=1]}", "did you mean seed", id="key"),
        pytest.param("train: {overrides: [seed=-1]}", "seed = -1", id="value"),
        pytest.param("train: {overrides: [--nope]}", "unknown flag --nope", id="flag"),
    ],
)
def test_refusals(tmp_path: Path, text: str, message: str) -> None:
    path = params(tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        resolve(CONF, path, [])
    assert str(path) in str(caught.value)


def test_no_params_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_params(tmp_path / "params.yaml")


def test_digest_sees_names_and_bytes(tmp_path: Path, inputs: list[Path]) -> None:
    first = content_digest(inputs)
    moved = [path.rename(path.parent.parent / path.name) for path in inputs]
    assert content_digest(moved) == first
    (moved[0] / "__pycache__").mkdir()
    (moved[0] / "__pycache__/a.pyc").write_text("compiled")
    assert content_digest(moved) == first
    (moved[0] / "b.py").write_text("B")
    assert content_digest(moved) != first
    (moved[0] / "b.py").write_text("b")
    (moved[0] / "b.py").rename(moved[0] / "c.py")
    assert content_digest(moved) != first


def test_digest_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone: No such file.*make data"):
        content_digest([tmp_path / "gone"])
