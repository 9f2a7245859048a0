"""Number formats: autocast, TF32 and the fp16 loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lockstep.config.schema import Precision
from lockstep.errors import UserError
from lockstep.models.build import blocks

_FP8_WIDTH = 1024


def autocast_dtype(cfg: Precision) -> torch.dtype | None:
    """Type of the arithmetic; None is fp32."""
    types = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}
    return types.get(cfg.name)


def autocast(cfg: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Context of a forward pass."""
    dtype = autocast_dtype(cfg)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def set_matmul_precision(cfg: Precision) -> None:
    """fp32 means fp32: TF32 is used by ``tf32`` alone, in convolutions too."""
    tf32 = cfg.name != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


def lower_residuals(model: nn.Module, cfg: Precision) -> None:
    """Let blocks hand on the type of the arithmetic.

    A ViT's position embedding is fp32, and so all that is added to it: under autocast each block
    reads and writes twice the bytes. Weights and their gradients stay fp32.
    """
    dtype = autocast_dtype(cfg)
    if dtype is None:
        return

    def lower(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # Some blocks (DenseNet's) are given a list; what is in it comes from other blocks.
        if not inputs or not isinstance(first := inputs[0], torch.Tensor):
            return inputs
        on = torch.is_autocast_enabled(first.device.type)
        return (first.to(dtype) if on else first, *inputs[1:])

    for block in blocks(model):
        block.register_forward_pre_hook(lower)


def use_fp8(model: nn.Module, device: torch.device) -> None:
    """Compute wide Linear layers of the blocks in 8 bits, scaled for each tensor.

    Micikevicius et al. 2022, "FP8 Formats for Deep Learning" (arXiv:2209.05433). Weights stay fp32,
    under the same names.

    Raises:
        UserError: nothing would gain, or this machine cannot.
    """
    wide = {
        id(layer)
        for block in blocks(model)
        for layer in block.modules()
        if type(layer) is nn.Linear
        and min(layer.in_features, layer.out_features) >= _FP8_WIDTH
        and layer.in_features % 16 == layer.out_features % 16 == 0  # as the tensor cores want it
    }
    if not wide:
        raise UserError(
            f"precision = fp8: the model has no Linear layer of {_FP8_WIDTH} x {_FP8_WIDTH} and "
            "more in its blocks; scaling narrower ones costs more than 8 bits save; use "
            "precision=bf16"
        )
    needs = "precision = fp8 needs a GPU of compute capability 8.9 or newer"
    if device.type != "cuda":
        raise UserError(f"{needs}, and this is a {device.type}: use precision=bf16")
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        raise UserError(
            f"{needs}; {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}: use "
            "precision=bf16"
        )
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as exc:
        raise UserError("precision = fp8 needs torchao: pip install -e '.[fp8]'") from exc
    convert_to_float8_training(model, module_filter_fn=lambda layer, _: id(layer) in wide)


class LossScaler:
    """Dynamic loss scale for fp16 (Micikevicius et al. 2018, arXiv:1710.03740).

    torch's GradScaler looks for overflow in local gradients; here the global gradient norm, known
    anyway and equal on every rank, decides, so all ranks and strategies skip the same steps.
    """

    def __init__(self, cfg: Precision) -> None:
        self.enabled = cfg.name == "fp16"
        self.scale = cfg.initial_scale if self.enabled else 1.0
        self._growth_interval = cfg.growth_interval
        self._good_steps = 0

    def step_is_good(self, norm: torch.Tensor) -> bool:
        """Whether to apply the update, given the norm of the scaled gradients; adapts the scale.

        Waits for the device in fp16, and only there.
        """
        if not self.enabled:
            return True
        if not bool(torch.isfinite(norm)):
            self.scale /= 2.0
            self._good_steps = 0
            return False
        self._good_steps += 1
        if self._good_steps >= self._growth_interval:
            self.scale *= 2.0
            self._good_steps = 0
        return True

    def state(self) -> dict[str, float]:
        """Plain numbers for the checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: dict[str, float]) -> None:
        """The inverse of :meth:`state`."""
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
