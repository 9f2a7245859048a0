from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from lockstep.config import bind as module
from lockstep.config.bind import (
    ADDED,
    NOT_LAW,
    bind,
    bind_saved,
    did_you_mean,
    fingerprint,
    law,
    load_config,
    open_dicts,
    run_name,
    save_config,
    schema_fields,
)
from lockstep.config.schema import Config
from lockstep.errors import UserError
from tests.conftest import REPOSITORY


@cache
def composed(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(REPOSITORY / "conf"), version_base="1.3"):
        return compose("config", list(overrides))


def bound(*overrides: str) -> Config:
    return bind(composed(*overrides))


def options() -> list[str]:
    return [f"{p.parent.name}={p.stem}" for p in (REPOSITORY / "conf").glob("*/[!_]*.yaml")]


@pytest.mark.parametrize("choice", sorted(options()))
def test_every_option_of_every_group_binds(choice: str) -> None:
    bound(choice, "++model.name=resnet18", "++data.root=somewhere")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("batch.global=-3", "batch.global = -3: should be greater than 0"),
        ("batch.micro=abc", "batch.micro = abc: should be a valid integer"),
        ("batch=3", "batch = 3: is a section: set batch.global, batch.micro"),
        ("epochs=1.5", "epochs = 1.5: should be a valid integer"),
        ("seed=true", "seed = true: should be a number"),
        ("optimizer.lr=yes", "optimizer.lr = "),
        ("optimizer.lr=nan", "optimizer.lr = NaN: should be a"),
        ("device=cdua", "device = cdua: should be 'auto', 'cuda' or 'cpu'; did you mean cuda?"),
        ("launch.processes=x", "or should be 'auto'"),
        ("augment.scale=[2,1,3]", "augment.scale = [2, 1, 3]: "),
        ("data.mean=[1,2]", "data.mean = [1, 2]: has too few values"),
        ("nccl.env=3", "nccl.env = 3: is a section: set nccl.env.NAME"),
        ("++optimizer.lrr=3", "optimizer.lrr = 3: unknown key; did you mean optimizer.lr?"),
        ("++lr=3", "lr = 3: unknown key; did you mean optimizer.lr?"),
        ("++zebra=3", "zebra = 3: unknown key"),
        ("model=timm", "model.name has no value: set model.name=... (timm model name)"),
        ("data=folder", "data.root has no value: set data.root=..."),
        ("data.root=${nope}", "data.root: Interpolation key 'nope' not found"),
        ("data.root=${oc.env:NO_SUCH_VARIABLE}", "NO_SUCH_VARIABLE"),
    ],
)
def test_a_mistake_is_one_line(override: str, line: str) -> None:
    with pytest.raises(UserError) as caught:
        bound(override)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_mistakes_at_once_with_full_keys() -> None:
    with pytest.raises(UserError) as caught:
        bound("batch.global=0", "model=timm", "++optimizer.lrr=1", "schedule.final=2", "seed=x")
    keys = {re.split(r"[ :]", line)[0] for line in str(caught.value).splitlines()}
    assert keys == {"batch.global", "model.name", "optimizer.lrr", "schedule.final", "seed"}


def test_a_key_without_a_home_in_the_yaml_is_missed() -> None:
    raw = bound().model_dump(mode="json", by_alias=True)
    del raw["batch"]["global"]
    with pytest.raises(UserError, match=r"batch\.global: no value in the YAML"):
        bind(raw)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("run.name=17", "run.name", "17"),
        ("data.root=2024", "data.root", "2024"),
        ("compile=off", "compile", "off"),
        ("optimizer.lr=1", "optimizer.lr", 1.0),
        ("launch.processes=2", "launch.processes", 2),
        ("++model.kwargs.depth=3", "model.kwargs.depth", 3),
    ],
)
def test_what_yaml_reads_too_cleverly(override: str, key: str, value: Any) -> None:
    tree: Any = bound(override).model_dump(by_alias=True)
    for part in key.split("."):
        tree = tree[part]
    assert tree == value and type(tree) is type(value)


def test_hydras_own_node_is_dropped() -> None:
    raw = bound().model_dump(mode="json", by_alias=True)
    assert bind(raw | {"hydra": {"run": {"dir": "."}}}) == bind(raw)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("run.root=elsewhere", True),
        ("strategy=fsdp", True),
        ("launch.processes=7", True),
        ("batch.micro=8", True),
        ("telemetry=wandb", True),
        ("checkpoint.every_steps=3", True),
        ("data.workers=3", True),
        ("stop_at=3", True),
        ("compile=default", True),
        ("strategy.sync_batchnorm=true", False),
        ("data.on_error=skip", True),
        ("seed=1", False),
        ("batch.global=65", False),
        ("++model.kwargs.depth=3", False),
        ("precision=bf16", False),
        ("optimizer.lr=0.002", False),
        ("optimizer.lr=1e-3", True),
    ],
)
def test_fingerprint_follows_what_is_computed_alone(override: str, same: bool) -> None:
    assert (fingerprint(bound(override)) == fingerprint(bound())) is same


def test_law_is_flat_plain_and_every_exception_from_it_is_a_key() -> None:
    flat = law(bound())
    assert flat["batch.global"] == 64 and flat["optimizer.kwargs.betas"] == [0.9, 0.999]
    assert not any(isinstance(v, dict | tuple) for v in flat.values())
    for pattern in (*NOT_LAW, *module.LAW_ALL_THE_SAME):
        assert any(re.fullmatch(pattern.replace("*", ".*"), key) for key in schema_fields())


@pytest.mark.parametrize(
    ("overrides", "choices", "swept", "name"),
    [
        ([], {"model": "vit_tiny"}, [], "digits-vit_tiny-auto-F"),
        ([], {}, [], "digits-vit_tiny_patch16_224-auto-F"),
        (
            ["model=timm", "model.name=hf-hub:a/b"],
            {"model": "timm"},
            [],
            "digits-hf-hub_a_b-auto-F",
        ),
        (["strategy=ddp"], {"model": "vit"}, ["strategy=ddp", "seed=3"], "digits-vit-ddp-F-seed.3"),
        (["run.name=mine"], {}, [], "mine"),
        (["run.name=mine"], {}, ["strategy=ddp", "x.y=[1, 2]"], "mine-strategy.ddp-x.y._1_2_"),
        (["run.name=mine"], {}, ["run.name=mine", "++a.b=1"], "mine-a.b.1"),
    ],
)
def test_run_name(
    overrides: list[str], choices: dict[str, str], swept: list[str], name: str
) -> None:
    config = bound(*overrides)
    assert run_name(config, choices, swept) == name.replace("F", fingerprint(config))


def test_a_long_run_name_is_cut_and_stays_its_own() -> None:
    many = [f"model.kwargs.some_long_key_{i}=value" for i in range(20)]
    names = {run_name(bound(), {}, [*many, f"seed={seed}"]) for seed in (1, 2)}
    assert len(names) == 2 and all(len(name) == 200 for name in names)


@pytest.mark.parametrize("name", ["../up", "a/b", ".", "..", ".hidden", "''"])
def test_run_name_is_a_folder_name(name: str) -> None:
    with pytest.raises(UserError, match=r"run\.name"):
        run_name(bound(f"run.name={name}"), {}, [])


def test_a_saved_configuration_is_the_same_configuration(tmp_path: Path) -> None:
    config = bound("experiment=digits", "compile=off", "optimizer.lr=1e-5", "run.name=17")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert [p.name for p in tmp_path.iterdir()] == ["config.yaml"]
    # As Hydra reads it.
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        assert bind(compose("config")) == config


@pytest.mark.parametrize(
    "text",
    ["a: !!python/object/apply:os.system ['touch executed']", "a: [1", "- 1", "7"],
    ids=["python object", "syntax", "a list", "a number"],
)
def test_a_file_that_is_no_configuration(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml"):
        load_config(tmp_path / "config.yaml")
    assert not (tmp_path / "executed").exists()
    with pytest.raises(UserError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_what_an_earlier_version_saved_can_be_read(tmp_path: Path) -> None:
    config = bound()
    save_config(config, tmp_path / "config.yaml")
    values = yaml.safe_load((tmp_path / "config.yaml").read_text())
    for key in ADDED:
        section, name = key.split(".")
        del values[section][name]
    del values["sweep"]  # a section of its own that came later
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    assert load_config(tmp_path / "config.yaml") == config
    assert not ADDED.keys() & law(config).keys()
    changed = bound("data.shuffle_block=8")
    assert law(changed) == law(config) | {"data.shuffle_block": 8}
    assert fingerprint(changed) != fingerprint(config)
    values.pop("data")
    with pytest.raises(UserError, match="data"):
        bind_saved(values)


def test_every_key_is_documented_or_speaks_for_itself() -> None:
    assert open_dicts() == ["model.kwargs", "nccl.env", "optimizer.kwargs", "launch.slurm"]
    assert "batch.global" in schema_fields() and "batch.global_batch" not in schema_fields()


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("optimizer.lrr", "; did you mean optimizer.lr?"),
        ("lr", "; did you mean optimizer.lr?"),
        ("batch.globl", "; did you mean batch.global?"),
        ("qqqqqq", ""),
    ],
)
def test_did_you_mean(word: str, hint: str) -> None:
    assert did_you_mean(word, list(schema_fields())) == hint
