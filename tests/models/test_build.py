"""One door to timm: what is built, counted, refused, and found to repeat."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn

from lockstep import dist
from lockstep.config.schema import Model
from lockstep.errors import UserError
from lockstep.models.build import blocks, build, count, no_decay_names
from lockstep.models.stochastic import SampleDropPath
from tests.pool import on_group


def config(name: str, **changes: Any) -> Model:
    values: dict[str, Any] = {
        "name": name,
        "pretrained": False,
        "image_size": None,
        "patch_size": None,
        "drop_path": 0.0,
        "activation_checkpointing": False,
        "draw": "model",
        "kwargs": {},
    }
    return Model(**(values | changes))


def built(name: str, size: int = 32, *, meta: bool = False, **changes: Any) -> nn.Module:
    return build(config(name, **changes), image_size=size, num_classes=10, seed=0, meta=meta)


TINY = {"patch_size": 8, "kwargs": {"depth": 3, "embed_dim": 48, "num_heads": 3}}

# --- building ---------------------------------------------------------------------------------


def test_weights_follow_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = built("vit_tiny_patch16_224", **TINY).state_dict()
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(after, torch.rand(1)), "the global generator is left as it was"
    second = built("vit_tiny_patch16_224", **TINY).state_dict()
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    other = build(
        config("vit_tiny_patch16_224", **TINY), image_size=32, num_classes=10, seed=1, meta=False
    )
    assert not torch.equal(other.state_dict()["head.weight"], first["head.weight"]) or (
        not torch.equal(other.state_dict()["pos_embed"], first["pos_embed"])
    )


@pytest.mark.parametrize(
    "image, patch, side",
    [
        pytest.param(32, "auto", 8, id="auto: a quarter of a small image"),
        pytest.param(224, "auto", 16, id="auto: 16"),
        pytest.param(64, "auto", 16, id="auto: the smallest for 16"),
        pytest.param(2, "auto", 1, id="auto: at least a pixel"),
        pytest.param(28, 7, 7, id="given"),
        pytest.param(224, None, 16, id="the model's own"),
    ],
)
def test_patches(image: int, patch: Any, side: int) -> None:
    model = built("vit_tiny_patch16_224", image, meta=True, patch_size=patch)
    assert model.patch_embed.patch_size == (side, side)
    assert model.pos_embed.shape[1] == (image // side) ** 2 + 1


def test_convolutions_take_any_size() -> None:
    assert built("resnet18", 40)(torch.zeros(2, 3, 40, 40)).shape == (2, 10)


def test_yaml_lists_become_tuples() -> None:
    model = built("resnet18", kwargs={"channels": [8, 16, 32, 64], "layers": [1, 1, 1, 1]})
    assert model.num_features == 64


def test_state_dict_has_the_names_of_timm() -> None:
    model = built("vit_tiny_patch16_224", drop_path=0.1, activation_checkpointing=True, **TINY)
    plain = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=10, **TINY["kwargs"]
    )
    assert list(model.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize(
    "name, size, changes, message",
    [
        pytest.param("vit_bse_patch16_224", 224, {}, "did you mean vit_base_patch", id="name"),
        pytest.param("qqqq", 224, {}, "no such model", id="nothing like it"),
        pytest.param("vit_tiny_patch16_224", 225, {}, "model.image_size=224", id="border pixels"),
        pytest.param("vit_tiny_patch16_224", 30, {"patch_size": 8}, "multiple", id="patch given"),
        pytest.param("vit_tiny_patch16_224", 8, {}, "multiple of the model's patch", id="small"),
        pytest.param("resnet18", 64, {"kwargs": {"depht": 3}}, "depht", id="unknown argument"),
        pytest.param("resnet18", 64, {"patch_size": 8}, "patch_size", id="patches of a ResNet"),
        pytest.param(
            "vit_tiny_patch16_224", 224, {"kwargs": {"embed_dim": 50}}, "embed_dim", id="heads"
        ),
        pytest.param(
            "vit_tiny_patch16_224", 224, {"kwargs": {"num_heads": 0}}, "num_heads", id="zero"
        ),
        pytest.param("vgg11", 224, {"drop_path": 0.1}, "drop_path", id="no stochastic depth"),
        pytest.param("densenet121", 224, {"drop_path": 0.1}, "drop_path", id="none in silence"),
    ],
)
def test_refused(name: str, size: int, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        built(name, size, meta=True, **changes)


def test_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    def no_network(*_: Any) -> None:
        raise OSError("Name or service not known")

    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("lockstep.models.build.hub.try_to_load_from_cache", lambda *_: None)
    monkeypatch.setattr("socket.getaddrinfo", no_network)
    with pytest.raises(UserError, match=r"pretrained = true: no network .*=false"):
        built("vit_tiny_patch16_224", 224, pretrained=True)


def refused_weights() -> tuple[str, str]:
    """Every rank's message, and where it goes on together with the others."""

    def absent(*_: Any, **__: Any) -> None:
        raise OSError("404")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lockstep.models.build._check_network", lambda _: None)
        patch.setattr("timm.create_model", absent)
        with pytest.raises(UserError) as caught:
            dist.together(lambda: built("vit_tiny_patch16_224", 224, pretrained=True))
    return str(caught.value), dist.broadcast_object("together")


def test_no_process_waits_for_weights_that_another_could_not_fetch(pool: Any) -> None:
    for message, place in pool(2, on_group, refused_weights):
        assert message.startswith("model.pretrained = true: the weights of vit_tiny")
        assert place == "together"


# --- counting ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, millions, macs, batchnorm",
    [
        # Published: He et al. 2016 and torchvision; Dosovitskiy et al. 2021; timm's results table.
        pytest.param("resnet18", 11.69, 1.82, True, id="resnet18"),
        pytest.param("resnet50", 25.56, 4.11, True, id="resnet50"),
        pytest.param("vit_base_patch16_224", 86.57, 17.58, False, id="vit-b"),
        pytest.param("vit_small_patch16_224", 22.05, 4.61, False, id="vit-s"),
        pytest.param("convnext_tiny", 28.59, 4.47, False, id="convnext-t"),
        pytest.param("swin_tiny_patch4_window7_224", 28.29, 4.51, False, id="swin-t"),
        pytest.param("efficientnet_b0", 5.29, 0.40, True, id="efficientnet-b0"),
    ],
)
def test_counts(name: str, millions: float, macs: float, batchnorm: bool) -> None:
    facts = count(config(name), image_size=224, num_classes=1000)
    assert facts.parameters / 1e6 == pytest.approx(millions, abs=0.005)
    # Two operations a multiply-add; biases, softmax and the like are counted differently.
    assert facts.forward_flops / 2e9 == pytest.approx(macs, rel=0.04)
    assert facts.has_batchnorm == batchnorm


def test_activations_are_those_that_autograd_keeps() -> None:
    """Against the tensors that a real pass keeps; counted once, parameters left out."""
    model = built("resnet18", 32)
    facts = count(config("resnet18"), image_size=32, num_classes=10)
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = model(torch.randn(8, 3, 32, 32))
    assert out.requires_grad
    assert facts.activation_bytes == pytest.approx(sum(kept.values()) / 8, rel=0.1)


def test_one_more_checkpointed_block_keeps_its_input() -> None:
    few, more = (
        count(
            config("vit_tiny_patch16_224", patch_size=8, kwargs=TINY["kwargs"] | {"depth": depth}),
            image_size=32,
            num_classes=10,
        )
        for depth in (3, 4)
    )
    tokens, width = 4 * 4 + 1, 48
    assert more.checkpointed_bytes - few.checkpointed_bytes == tokens * width * 4
    assert few.checkpointed_bytes < few.activation_bytes
    assert few.parameters + few.block_parameters == more.parameters
    assert (few.blocks, more.blocks) == (3, 4)


@pytest.mark.parametrize(
    "name, size",
    [("swin_tiny_patch4_window7_224", 30), ("densenet121", 16), ("inception_v4", 32)],
)
def test_size_that_the_model_refuses(name: str, size: int) -> None:
    with pytest.raises(UserError, match=f"image_size = {size}"):
        count(config(name), image_size=size, num_classes=10)


# --- blocks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kind, number",
    [
        ("vit_tiny_patch16_224", "Block", 12),
        ("deit3_small_patch16_224", "Block", 12),
        ("eva02_tiny_patch14_224", "EvaBlock", 12),
        ("beit_base_patch16_224", "Block", 12),
        ("resnet18", "BasicBlock", 8),
        ("resnet50", "Bottleneck", 16),
        ("convnext_tiny", "ConvNeXtBlock", 18),
        ("swin_tiny_patch4_window7_224", "SwinTransformerBlock", 12),
        ("swinv2_tiny_window8_256", "SwinTransformerV2Block", 12),
        ("regnety_004", "Bottleneck", 15),
        ("efficientnet_b0", "InvertedResidual", 15),
        ("mixer_s16_224", "MixerBlock", 8),
        ("nfnet_f0", "NormFreeBlock", 12),
    ],
)
def test_blocks(name: str, kind: str, number: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    found = blocks(model)
    assert [type(b).__name__ for b in found] == [kind] * number


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "densenet121", "coatnet_0_rw_224"])
def test_blocks_do_not_overlap(name: str) -> None:
    with torch.device("meta"):
        found = blocks(timm.create_model(name))
    inside = {id(m) for block in found for m in block.modules() if m is not block}
    assert len(found) > 1
    assert not any(id(block) in inside for block in found)


def test_a_network_without_repetition_has_none() -> None:
    assert blocks(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Flatten())) == []


# --- activation checkpointing -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name, changes",
    [
        pytest.param("vit_tiny_patch16_224", TINY, id="vit"),
        pytest.param("test_resnet", {}, id="resnet"),
        pytest.param("convnext_atto", {}, id="convnext"),
    ],
)
def test_checkpointing_changes_nothing(name: str, changes: dict[str, Any]) -> None:
    """Gradients, and BatchNorm's running statistics: the second pass must not count."""
    plain = built(name, drop_path=0.3, **changes)
    thrifty = built(name, drop_path=0.3, activation_checkpointing=True, **changes)
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    saved: list[int] = []
    for model in (plain, thrifty):
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = model(images, seeds=torch.arange(4))
        out.logsumexp(1).sum().backward()
        saved.append(sum(sizes))
    assert saved[1] < 0.7 * saved[0]
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (plain, thrifty)]
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)
    buffers = [{n: b for n, b in m.named_buffers() if "tracked" not in n} for m in (plain, thrifty)]
    torch.testing.assert_close(buffers[1], buffers[0], rtol=0, atol=0)


def test_checkpointed_blocks_are_found_and_copied() -> None:
    model = built("vit_tiny_patch16_224", activation_checkpointing=True, **TINY)
    assert len(blocks(model)) == 3
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin(torch.ones(1, 3, 32, 32)).isfinite().all()
    tokens = torch.arange(96.0).view(1, 2, 48).sin()
    assert torch.equal(model.blocks[0](tokens), tokens)
    assert not torch.equal(twin.blocks[0](tokens), tokens), "the copy computes with its own"


# --- details ----------------------------------------------------------------------------------


def test_names_without_decay() -> None:
    assert "pos_embed" in no_decay_names(built("vit_tiny_patch16_224", meta=True, **TINY))
    assert no_decay_names(nn.Linear(2, 2)) == set()


def test_meta_models_hold_no_memory() -> None:
    model = built("vit_tiny_patch16_224", 224, meta=True, drop_path=0.1)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert any(isinstance(m, SampleDropPath) for m in model.modules())
