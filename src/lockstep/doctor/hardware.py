"""What GPUs could do at most, as their makers state it for dense arithmetic."""

from __future__ import annotations

_TFLOPS = {
    "H200": {"fp8": 1979.0, "half": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H100": {"fp8": 1979.0, "half": 989.4, "tf32": 494.7, "fp32": 66.9},
    "A100": {"half": 312.0, "tf32": 156.0, "fp32": 19.5},
}
_SLOWER = ("PCIe", "NVL")
"""Cards of the same name with lower clocks; an A100 is as fast on paper either way."""


def peak_flops(gpu: str, precision: str) -> float | None:
    """FLOP/s of one GPU in a precision of ``conf/precision``; None where we do not know.

    Args:
        gpu: as torch names it ("NVIDIA H200").
    """
    name = next((name for name in _TFLOPS if name in gpu), None)
    if name is None or (name != "A100" and any(word in gpu for word in _SLOWER)):
        return None
    kind = "half" if precision in ("bf16", "fp16") else precision
    tflops = _TFLOPS[name].get(kind)
    return tflops * 1e12 if tflops is not None else None
