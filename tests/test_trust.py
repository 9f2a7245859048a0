"""What comes from strangers executes nothing and leads nowhere.

Configurations, checkpoints, exports, run folders, images and archives. Forged indices and shards
of a checkpoint are in checkpoint/test_shards.py, forged manifests in checkpoint/test_manifest.py.
"""

from __future__ import annotations

import ast
import io
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.datasets.utils import extract_archive

from lockstep.checkpoint.manifest import MANIFEST, Manifest, commit, describe, read_manifest
from lockstep.checkpoint.store import Store
from lockstep.config.bind import bind, load_config
from lockstep.data import download
from lockstep.data.source import FolderSource
from lockstep.errors import EXIT_USER_ERROR, UserError
from lockstep.evaluation import evaluate_weights, read_weights
from lockstep.launch import launch
from lockstep.models.build import build
from tests.conftest import REPOSITORY
from tests.runs import configure

SMALL = (
    "device=cpu", "strategy=single", "data.num_classes=null", "batch.global=32", "steps=1",
    "++model.kwargs={depth: 1, embed_dim: 24, num_heads: 2}",
)  # fmt: skip


class Payload:
    """Creates a file when unpickled carelessly."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.fixture
def executed(tmp_path: Path) -> Iterator[Path]:
    """A file that no test may create."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, few_digits: Path) -> Path:
    """A finished run. Do not change."""
    root = tmp_path_factory.mktemp("runs")
    config = configure(*SMALL, f"data.root={few_digits}", f"run.root={root}")
    assert launch(config, "run") == 0
    return root / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A finished run, to be tampered with."""
    return shutil.copytree(finished, tmp_path / "run", symlinks=True)


# --- the code ---------------------------------------------------------------------------------

DANGEROUS = (
    "pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy",
    "tarfile", "zipfile", "shutil.unpack_archive", "eval", "exec", "compile", "__import__",
    "importlib", "torch.load", "torch.hub", "torch.jit.load", "torch.package", "numpy.load",
    "np.load", "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.Loader",
    "yaml.UnsafeLoader", "yaml.FullLoader", "os.system", "os.popen", "hydra.utils",
)  # fmt: skip
ALLOWED = {
    # An unpickler that admits the classes of an index alone.
    "src/lockstep/checkpoint/shards.py": {"pickle"},
    # Sets the filter without which torchvision would trust an archive.
    "src/lockstep/data/download.py": {"tarfile"},
    # Plain arrays (allow_pickle=False) of this user's own cache, and of a pack.
    "src/lockstep/data/listing.py": {"np.load", "zipfile"},
    "src/lockstep/data/packed.py": {"np.load"},
    # Asks which versions are installed.
    "scripts/bench_data.py": {"importlib"},
    "src/lockstep/versions/outputs.py": {"importlib"},
    # Makes headers of archives; opens none.
    "src/lockstep/data/pack.py": {"tarfile"},
    # The worker's own function, by a name that the launcher wrote.
    "src/lockstep/launch/process.py": {"importlib"},
}
CODE = sorted(
    [*REPOSITORY.glob("src/**/*.py"), *REPOSITORY.glob("scripts/*.py"), REPOSITORY / "train.py"]
)


def used_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported or used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def dangerous_uses(source: str) -> set[str]:
    names = set(used_names(ast.parse(source)))
    found = {d for d in DANGEROUS for n in names if n == d or n.startswith(d + ".")}
    return found | {"shell" for n in ast.walk(ast.parse(source)) if _starts_a_shell(n)}


def _starts_a_shell(node: ast.AST) -> bool:
    return isinstance(node, ast.keyword) and node.arg == "shell"


@pytest.mark.parametrize("path", CODE, ids=[str(p.relative_to(REPOSITORY)) for p in CODE])
def test_code_that_could_run_code_is_listed(path: Path) -> None:
    allowed = ALLOWED.get(str(path.relative_to(REPOSITORY)), set())
    assert dangerous_uses(path.read_text()) == allowed


@pytest.mark.parametrize(
    "source, found",
    [
        ("import torch\ntorch.load(f)", {"torch.load"}),
        ("from torch import load", {"torch.load"}),
        ("import numpy as np\nnp.load(f)", {"np.load"}),
        ("from importlib import import_module", {"importlib"}),
        ("run(x, shell=True)", {"shell"}),
        ("model.eval()\nre.compile(p)\nmodel.compile()\ntorch.load_state", set()),
    ],
)
def test_the_check_itself(source: str, found: set[str]) -> None:
    assert dangerous_uses(source) == found


# --- configurations ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag",
    [
        "!!python/object/apply:pathlib.Path.touch [{path}]",
        "!!python/object/apply:os.system ['touch {path}']",
        "!!python/object/new:pathlib.PosixPath [{path}]",
        "!!python/name:os.system",
        "!!python/module:os",
        "!unknown [{path}]",
    ],
)
def test_yaml_tags_are_errors(run: Path, executed: Path, tag: str) -> None:
    path = run / "config.yaml"
    path.write_text(f"{path.read_text()}\nattack: {tag.format(path=executed)}\n")
    for read in (lambda: load_config(path), lambda: read_weights(run, "auto")):
        with pytest.raises(UserError, match="could not determine a constructor"):
            read()


TARGET = {"_target_": "pathlib.Path.touch", "_args_": ["{path}"]}


@pytest.mark.parametrize("section", ["", "model", "model.kwargs", "optimizer.kwargs", "data.mean"])
def test_a_target_is_no_call(
    finished: Path, few_digits: Path, tmp_path: Path, executed: Path, section: str
) -> None:
    """Unknown keys are refused; where any name is legal, timm and torch refuse them."""
    values = load_config(finished / "config.yaml").model_dump(by_alias=True, mode="json")
    node = values
    for key in section.split(".") if section else []:
        node[key] = node[key] if isinstance(node[key], dict) else {}
        node = node[key]
    node |= json.loads(json.dumps(TARGET).replace("{path}", str(executed)))
    values["run"]["root"] = str(tmp_path / "new")
    with pytest.raises(UserError):
        if launch(bind(values), "run") == EXIT_USER_ERROR:
            raise UserError("told by the launcher")


HOOKS = {
    "callback": ("callbacks: {{x: {{_target_: pathlib.Path.touch, _args_: [{path}]}}}}", "callbacks"),
    "callback that unpickles": (
        "callbacks: {{x: {{_target_: joblib.load, _args_: [{path}.pkl]}}}}", "callbacks"
    ),
    "environment": ("job: {{env_set: {{LD_PRELOAD: {path}.so}}}}", "job.env_set"),
}  # fmt: skip


@pytest.mark.parametrize("node, key", HOOKS.values(), ids=HOOKS)
def test_a_saved_configuration_hooks_nothing_into_hydra(
    train: Callable[..., Any], run: Path, executed: Path, node: str, key: str
) -> None:
    Path(f"{executed}.pkl").write_bytes(pickle.dumps(Payload(executed)))
    with (run / "config.yaml").open("a") as file:
        file.write(f"hydra: {{{node.format(path=executed)}}}\n".replace("{{", "{"))
    done = train("--config-path", str(run), "--config-name", "config", "plan=true")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: hydra.{key}: ")


SWEEP_HOOKS = {
    "sampler": ("sweeper: {sampler: {_target_: os.getcwd}}", "sweeper.sampler._target_", "hydra/sweeper=optuna"),
    "launcher": ("launcher: {_target_: os.getcwd}", "launcher._target_", "seed=1,2"),
    "setup": ("launcher: {setup: [mkdir PATH]}", "launcher.setup", "hydra/launcher=submitit_slurm"),
}  # fmt: skip


@pytest.mark.parametrize("node, key, word", SWEEP_HOOKS.values(), ids=SWEEP_HOOKS)
def test_a_saved_configuration_hooks_nothing_into_a_sweep(
    train: Callable[..., Any], run: Path, executed: Path, node: str, key: str, word: str
) -> None:
    if "/" in word:
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    with (run / "config.yaml").open("a") as file:
        file.write(f"hydra: {{{node.replace('PATH', str(executed))}}}\n")
    done = train("-m", "--config-path", str(run), "--config-name", "config", word)
    assert done.returncode == 2, done.stderr
    assert f"error: hydra.{key}: " in done.stderr
    assert not executed.exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("LD_PRELOAD", "x.so"),
        ("PYTHONPATH", "."),
        ("TORCHINDUCTOR_CACHE_DIR", "cache"),
        ("CUDA_INJECTION64_PATH", "x.so"),
        ("NCCL_NET_PLUGIN", "/tmp/x.so"),
        ("NCCL_CONF_FILE", "../x"),
    ],
)
def test_nccl_env_sets_communication_alone(finished: Path, name: str, value: str) -> None:
    values = load_config(finished / "config.yaml").model_dump(by_alias=True)
    values["nccl"]["env"] = {name: value}
    with pytest.raises(UserError, match=f"nccl.env.*export {name} yourself"):
        bind(values)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"checkpoint_path": "{path}.pth"},
        {"checkpoint_path": "{path}.npz"},
        {"pretrained": True, "pretrained_cfg": {"file": "{path}.pth"}},
        {"pretrained_cfg_overlay": {"file": "{path}.pth"}},
    ],
    ids=["pickle", "numpy", "weights of another", "overlay"],
)
def test_a_recipe_loads_no_pickle(executed: Path, kwargs: dict[str, Any]) -> None:
    torch.save(Payload(executed), f"{executed}.pth")
    filled = json.loads(json.dumps(kwargs).replace("{path}", str(executed)))
    model = configure("model=resnet18").model.model_copy(update={"kwargs": filled})
    with pytest.raises(UserError, match=r"model\.kwargs\.(pretrained|checkpoint_path)"):
        build(model, image_size=32, num_classes=4, seed=0, meta=False)


@pytest.mark.parametrize("name", ["hf-hub:stranger/model", "local-dir:/tmp", "os.system"])
def test_a_model_name_is_one_of_timm(name: str) -> None:
    model = configure("model=resnet18").model.model_copy(update={"name": name})
    with pytest.raises(UserError, match="timm has no such model"):
        build(model, image_size=32, num_classes=4, seed=0, meta=False)


# --- exports ----------------------------------------------------------------------------------


def put(key: str, value: Any) -> Callable[[dict[str, Any], Path], Any]:
    """Set a dotted key of a card or of a checkpoint's plain values."""

    def change(card: dict[str, Any], _weights: Path) -> None:
        *path, last = key.split(".")
        for part in path:
            card = card[part]
        card[last] = value

    return change


def _pickled(card: dict[str, Any], weights: Path) -> None:
    weights.write_bytes(pickle.dumps(Payload(weights.parent.parent / "executed")))


def _saved_by_torch(card: dict[str, Any], weights: Path) -> None:
    torch.save(Payload(weights.parent.parent / "executed"), weights)


LIES = {
    "pickle": (_pickled, "not a safetensors file"),
    "torch.save": (_saved_by_torch, "not a safetensors file"),
    "endless header": (
        lambda c, w: w.write_bytes((2**62).to_bytes(8, "little")), "not a safetensors file"
    ),
    "other file than the one given": (put("weights.file", "/etc/passwd"), None),
    "no file": (put("weights.file", 7), "not a card"),
    "recipe of another type": (put("recipe", "os.system"), "recipe: "),
    "recipe with a target": (put("recipe._target_", "os.system"), "_target_ = os.system: unknown"),
    "recipe with a hook": (put("recipe.hydra", {"callbacks": {"x": TARGET}}), None),
    "number of classes": (put("num_classes", 10**9), "1000000000 classes"),
    "size of images": (put("image_size", "x"), "image_size: "),
    "classes": (put("classes", 4), "classes: "),
    "classes that lead out": (put("classes", ["../a", "b", "c", "d"]), "different class folders"),
    "step": (put("metrics.step", "x"), "metrics.step: "),
    "data": (put("data", None), "data: "),
}  # fmt: skip


@pytest.mark.parametrize("lie, message", LIES.values(), ids=LIES)
def test_a_lying_card(
    run: Path, executed: Path, lie: Callable[[dict[str, Any], Path], Any], message: str | None
) -> None:
    weights, card_file = run / "model.safetensors", run / "model.json"
    card = json.loads(card_file.read_text())
    lie(card, weights)
    card["weights"]["sha256"] = describe(weights).sha256  # and the checksum fits
    card_file.write_text(json.dumps(card))

    def attempt() -> None:
        evaluate_weights(read_weights(weights, "auto"), root=None, batch=None, device="cpu")

    if message is None:  # not looked at
        attempt()
        return
    with pytest.raises(UserError) as caught:
        attempt()
    assert message in str(caught.value)


def test_a_card_names_its_neighbour_alone(run: Path) -> None:
    card = json.loads((run / "model.json").read_text())
    card["weights"]["file"] = "../../model.safetensors"
    (run / "model.json").write_text(json.dumps(card))
    assert read_weights(run / "model.json", "auto").step == 1
    card["weights"]["file"] = "/etc/passwd"
    (run / "model.json").write_text(json.dumps(card))
    with pytest.raises(UserError, match="run/passwd: cannot be read"):
        read_weights(run / "model.json", "auto")


# --- run folders ------------------------------------------------------------------------------


def tampered(run: Path, change: Callable[[dict[str, Any], Path], Any]) -> Path:
    """Change the plain values of the run's checkpoint, and commit them again."""
    folder = run / "checkpoints/step-1"
    manifest = read_manifest(folder)
    change(manifest.meta, folder)
    commit(folder, Manifest(1, manifest.metric, manifest.meta, manifest.files))
    return folder


@pytest.mark.parametrize(
    "key, value",
    [
        ("law", ["os.system"]),
        ("progress", None),
        ("progress.best_top1", "x"),
        ("data", "x"),
        ("versions", [1]),
        ("classes", 3),
    ],
)
def test_plain_values_of_another_type(run: Path, key: str, value: Any) -> None:
    tampered(run, put(key, value))
    with pytest.raises(UserError, match=f"step-1: {key}: "):
        read_weights(run, "auto")


def test_going_on_from_a_strangers_run(
    run: Path, few_digits: Path, tmp_path: Path, executed: Path
) -> None:
    """Of ``resume=PATH`` only the verified checkpoint is read."""
    for name in ("config.yaml", "plan.json", "DONE", "metrics.jsonl", "wandb-id"):
        (run / name).write_text(f"!!python/object/apply:os.system ['touch {executed}']")
    (run / "checkpoints/step-2").symlink_to("/")
    options = (f"data.root={few_digits}", f"run.root={tmp_path / 'mine'}", f"resume={run}")
    assert launch(configure(*SMALL, *options), "run") == 0
    assert json.loads((tmp_path / "mine/run/DONE").read_text())["step"] == 1


def test_retention_follows_no_link(run: Path, tmp_path: Path) -> None:
    """A checkpoint that is a link to another run's: the link goes, what it leads to stays."""
    other = shutil.copytree(run / "checkpoints/step-1", tmp_path / "other/step-0")
    (run / "checkpoints/step-0").symlink_to(other)
    before = sorted(path.name for path in other.iterdir())
    store = Store(run, keep_last=1, keep_best=False, asynchronous=False)
    meta = read_manifest(other).meta
    store.save(2, {"model": {"weight": torch.zeros(2)}}, meta, metric=None)
    assert sorted(path.name for path in other.iterdir()) == before
    assert {p.name for p in run.glob("checkpoints/step-*")} == {"step-2"}


def test_a_manifest_that_is_a_link_out(run: Path, tmp_path: Path) -> None:
    """It is read as a file and fits no checksum."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    path = run / "checkpoints/step-1" / MANIFEST
    path.unlink()
    path.symlink_to(secret)
    with pytest.raises(UserError) as caught:
        read_weights(run, "auto")
    assert "checksum differs" in str(caught.value)


# --- images -----------------------------------------------------------------------------------


@pytest.fixture
def images(few_digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(few_digits, tmp_path / "images")


def test_a_class_folder_leads_out(images: Path, tmp_path: Path) -> None:
    shutil.move(images / "train/0", tmp_path / "elsewhere")
    (images / "train/0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"train/0 is a link to .*elsewhere, outside of the data"):
        FolderSource.open(images, "train")


def test_a_link_to_what_never_ends_is_no_image(images: Path) -> None:
    """A link to an image elsewhere is one: it is read, and nothing of it leaves."""
    os.mkfifo(images / "pipe")
    names = {p.name for p in images.glob("train/0/*")}
    (images / "train/0/pipe.png").symlink_to("../../pipe")
    (images / "train/0/zero.png").symlink_to("/dev/zero")
    (images / "train/0/linked.png").symlink_to(images / "train/1" / min(names))
    source = FolderSource.open(images, "train")
    listed = {source.name(i).rpartition("/")[2] for i in range(len(source))}
    assert "linked.png" in listed and not listed & {"pipe.png", "zero.png"}


# --- archives ---------------------------------------------------------------------------------


def _member(name: str, **fields: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    for key, value in fields.items():
        setattr(member, key, value)
    return member


MEMBERS = {
    "parent": [_member("../escaped")],
    "parent within": [_member("a/../../escaped")],
    "through a link": [
        _member("a", type=tarfile.SYMTYPE, linkname=".."), _member("a/escaped"),
    ],
    "link to outside": [_member("a", type=tarfile.SYMTYPE, linkname="/etc")],
    "hard link to outside": [_member("a", type=tarfile.LNKTYPE, linkname="../kept")],
    "device": [_member("a", type=tarfile.CHRTYPE, devmajor=1, devminor=5)],
    "pipe": [_member("a", type=tarfile.FIFOTYPE)],
}  # fmt: skip


@pytest.mark.skipif(not hasattr(tarfile, "data_filter"), reason="needs Python 3.11.4")
@pytest.mark.parametrize("members", MEMBERS.values(), ids=MEMBERS)
def test_an_archive_stays_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[tarfile.TarInfo]
) -> None:
    """As torchvision would unpack a download whose checksum fits."""
    (tmp_path / "kept").write_text("kept")
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for member in members:
            tar.addfile(member, io.BytesIO())

    def fill(raw: Path, folder: Path) -> None:
        extract_archive(str(archive), str(raw / "inside"))

    monkeypatch.setitem(download.DOWNLOADS, "imagenette", download._Download(fill, (1, 1)))
    root = tmp_path / "data"
    with pytest.raises(UserError, match="imagenette could not be downloaded"):
        download.download("imagenette", root)
    assert list(root.iterdir()) == []
    assert {p.name for p in tmp_path.iterdir()} == {"kept", "archive.tar.gz", "data"}
    assert tarfile.TarFile.extraction_filter is None, "only here"
