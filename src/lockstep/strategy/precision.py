"""Number formats: autocast, TF32 and the fp16 loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from lockstep.config.schema import Precision


def autocast_dtype(cfg: Precision) -> torch.dtype | None:
    """Type of the arithmetic; None is fp32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(cfg.name)


def autocast(cfg: Precision, device: torch.device) -> AbstractContextManager[None]:
    """Context of a forward pass."""
    dtype = autocast_dtype(cfg)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def set_matmul_precision(cfg: Precision) -> None:
    """fp32 means fp32: TF32 is used by ``tf32`` alone, in convolutions too."""
    tf32 = cfg.name != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


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
