"""What the device does in a step: time by kind of kernel, idle time, exposed communication."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from torch.profiler import profile

COMMUNICATION = "communication"
KINDS: dict[str, str] = {
    COMMUNICATION: r"nccl|gloo|c10d",
    "attention": r"flash|fmha|attention|sdpa",
    "optimiser": r"multi_tensor_apply|triton_for_|_foreach_|_fused_(adam|sgd)|fusedadam|fusedsgd",
    "convolution": r"triton_tem\w*conv|^(?!triton).*(convolution|conv2d|conv_depthwise|fprop|dgrad|"
    r"wgrad|implicit|winograd|nhwctonchw|nchwtonhwc)",
    "matmul": r"triton_tem|^(?!triton).*(gemm|gemv|nvjet|cutlass|splitk|cublas|matmul|linear|"
    r"::(add|b|badd)?mm\b|scaled_mm|mkl_linear)",
    "copy": r"^(?!triton).*(memcpy|memset|copy|fill|zero_|catarray|::cat\b|chunk_cat|clone)",
    "normalisation + pointwise": r"triton|elementwise|norm|bn_|reduce|softmax|pool|loss|gelu|relu|"
    r"silu|moments|gradient_sums|::(add|sub|mul|div|sum|mean|neg|exp|sqrt|where|clamp|dropout)",
}
"""Patterns of kernel names (of operators on the CPU), the first that fits; others are "other"."""
OTHER = "other"
_TOP = 30

Interval = tuple[int, int]
"""Nanoseconds [start, stop)."""


def kind_of(name: str) -> str:
    """Of a kernel or operator, by its name."""
    return next(
        (k for k, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHER
    )


def summary(profiler: profile, steps: int) -> dict[str, Any]:
    """What a stopped profiler has seen in ``steps`` steps, as plain values a step.

    Kernels of several streams overlap, so the shares of kinds and of idle time may add up to more
    than one. On the CPU these are operators, without the time of those that they call; idle is what lies between.
    """
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.duration_ns() > 0]
    kernels = [e for e in events if not _is_cpu(e) and not e.is_user_annotation()]
    work = [(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in kernels]
    return summarise(work or _own_time(events), steps)


def summarise(work: Sequence[tuple[str, int, int]], steps: int) -> dict[str, Any]:
    """:func:`summary` of (name, start, stop) in nanoseconds."""
    if not work:
        return {"steps": steps, "step_ms": 0.0, "kinds": {}, "top": []}
    by_kind: dict[str, list[Interval]] = defaultdict(list)
    by_name: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for name, start, stop in work:
        by_kind[kind_of(name)].append((start, stop))
        by_name[name] += stop - start
        times[name] += 1
    span = max(stop for _, _, stop in work) - min(start for _, start, _ in work)
    computing = merged(i for kind, found in by_kind.items() if kind != COMMUNICATION for i in found)
    talking = merged(by_kind.get(COMMUNICATION, []))
    busy = length(merged([*computing, *talking]))

    def a_step(nanoseconds: int) -> float:
        return round(nanoseconds / steps / 1e6, 4)

    sums = {kind: sum(b - a for a, b in found) for kind, found in by_kind.items()}
    return {
        "steps": steps,
        "step_ms": a_step(span),
        "kinds": {
            kind: {
                "ms": a_step(total),
                "share": round(total / span, 4),
                "kernels": round(len(by_kind[kind]) / steps, 1),
            }
            for kind, total in sorted(sums.items(), key=lambda item: -item[1])
        },
        "idle_ms": a_step(span - busy),
        "idle_share": round(1 - busy / span, 4),
        "communication_ms": a_step(length(talking)),
        "exposed_communication_ms": a_step(busy - length(computing)),
        "top": [
            {"name": name[:160], "kind": kind_of(name), "ms": a_step(total), "times": times[name]}
            for name, total in by_name.most_common(_TOP)
        ],
    }


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not overlap, in order."""
    out: list[Interval] = []
    for start, stop in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], stop))
        else:
            out.append((start, stop))
    return out


def length(intervals: Iterable[Interval]) -> int:
    """Of intervals that do not overlap."""
    return sum(stop - start for start, stop in intervals)


def table(found: dict[str, Any]) -> str:
    """A summary as aligned lines."""
    rows = [(kind, k["ms"], k["share"], k["kernels"]) for kind, k in found["kinds"].items()]
    lines = [f"{'kind':<26} {'ms/step':>9} {'share':>7} {'kernels':>8}"]
    lines += [f"{kind:<26} {ms:>9.3f} {share:>7.1%} {n:>8.0f}" for kind, ms, share, n in rows]
    if rows:
        lines.append(f"{'idle':<26} {found['idle_ms']:>9.3f} {found['idle_share']:>7.1%}")
    if found.get("communication_ms"):
        exposed = found["exposed_communication_ms"]
        lines.append(
            f"{'exposed communication':<26} {exposed:>9.3f} {exposed / found['step_ms']:>7.1%}"
        )
    lines.append(f"{'step under the profiler':<26} {found['step_ms']:>9.3f}")
    return "\n".join(lines)


def _is_cpu(event: Any) -> bool:
    return bool(event.device_type().name == "CPU")


def _own_time(events: Iterable[Any]) -> list[tuple[str, int, int]]:
    """When each operator runs itself, not another one that it calls.

    Communication counts whole: it has threads of its own.
    """
    by_thread: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
    work: list[tuple[str, int, int]] = []
    for e in events:
        name, start, stop = e.name(), e.start_ns(), e.start_ns() + e.duration_ns()
        if kind_of(name) == COMMUNICATION:
            work.append((name, start, stop))
        else:
            by_thread[e.start_thread_id()].append((start, -stop, name))
    for found in by_thread.values():
        running: list[tuple[str, int]] = []
        at = 0
        for start, minus_stop, name in [*sorted(found), (2**63, 0, "")]:
            while running and running[-1][1] <= start:
                ended, stop = running.pop()
                work.append((ended, at, stop))
                at = max(at, stop)
            if running:
                work.append((running[-1][0], at, start))
            running.append((name, -minus_stop))
            at = start
    return [(name, start, stop) for name, start, stop in work if stop > start]
