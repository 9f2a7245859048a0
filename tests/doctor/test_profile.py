"""Kernels by kind, and the arithmetic of overlapping intervals."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.doctor.profile import kind_of, merged, summarise, summary, table

NAMES = {
    "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "gloo:all_reduce": "communication",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedSgdMathFunctor>": (
        "optimiser"
    ),
    "triton_for_fused_0": "optimiser",
    "aten::_foreach_lerp_": "optimiser",
    "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64": (
        "convolution"
    ),
    "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_bf16>": (
        "convolution"
    ),
    "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float>": "convolution",
    "aten::mkldnn_convolution": "convolution",
    "nvjet_tst_192x192_64x4_2x1_v_bz_TNT": "matmul",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256>": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64": "matmul",
    "aten::addmm": "matmul",
    "triton_tem_fused_mm_3": "matmul",
    "triton_tem_fused_convolution_3": "convolution",
    "triton_poi_fused__to_copy_convolution_2": "normalisation + pointwise",
    "triton_per_fused_native_layer_norm_backward_7": "normalisation + pointwise",
    "void cudnn::bn_bw_1C11_kernel_new<__nv_bfloat16, float, float2, 512, true, 1>": (
        "normalisation + pointwise"
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>": (
        "normalisation + pointwise"
    ),
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>": "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float>": "copy",
    "something_new": "other",
}


@pytest.mark.parametrize("name, kind", NAMES.items(), ids=[name[-40:] for name in NAMES])
def test_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    "intervals, expected",
    [
        pytest.param([], [], id="none"),
        pytest.param([(5, 6), (0, 2)], [(0, 2), (5, 6)], id="apart"),
        pytest.param([(0, 2), (2, 3), (1, 5)], [(0, 5)], id="overlapping"),
        pytest.param([(0, 9), (2, 3)], [(0, 9)], id="within"),
    ],
)
def test_merged(intervals: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert merged(intervals) == expected


def test_exposed_is_what_no_computation_hides() -> None:
    ms = 1_000_000
    work = [("gemm", 0, 4 * ms), ("ncclDevKernel", 3 * ms, 8 * ms), ("gemm", 6 * ms, 7 * ms)]
    work.append(("Memset (Device)", 9 * ms, 10 * ms))
    found = summarise(work, 2)
    assert found["step_ms"] == 5
    assert found["communication_ms"] == 2.5
    assert found["exposed_communication_ms"] == 1.5  # from 4 to 6, and from 7 to 8
    assert (found["idle_ms"], found["idle_share"]) == (0.5, 0.1)
    assert found["kinds"]["matmul"] == {"ms": 2.5, "share": 0.5, "kernels": 1.0}
    assert "exposed communication" in table(found)
    assert "step under the profiler" in table(summarise([], 2))


def test_an_operator_counts_without_those_that_it_calls() -> None:
    x = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.nn.functional.linear(x, x, x[0])
    found = summary(profiler, 1)
    assert found["kinds"]["matmul"]["ms"] > 0
    assert sum(kind["ms"] for kind in found["kinds"].values()) <= found["step_ms"] + 0.01
