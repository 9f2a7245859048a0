"""Which cases a scaling report consists of, and its arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.doctor import bench, scaling
from lockstep.doctor.bench import Case
from lockstep.doctor.chart import chart
from lockstep.doctor.scaling import cases_of, counts_up_to, with_speed_up
from lockstep.errors import UserError
from scripts import scaling as door
from tests.conftest import REPOSITORY
from tests.doctor.test_bench import row

VIT = ("model.kwargs={depth: 1, embed_dim: 24, num_heads: 2}", "data.num_classes=4")


def asked(**changes: Any) -> list[Any]:
    told = {
        "models": ["vit_tiny"],
        "strategies": ["ddp", "fsdp-full", "fsdp-grad_op"],
        "precisions": ["fp32"],
        "counts": [1, 2],
        "words": ["device=cpu", "data.image_size=16"],
        "overrides": VIT,
        "batch": 4,
    }
    return list(cases_of(REPOSITORY / "conf", **(told | changes)))


def test_one_alone_then_each_way_of_sharing() -> None:
    found = [(case.plan.strategy, case.label["shard"], case.label["global_batch"])
             for case in asked()]  # fmt: skip
    assert found == [
        ("single", None, 4),
        ("ddp", None, 8),
        ("fsdp", "full", 8),
        ("fsdp", "grad_op", 8),
    ]


def test_every_case_with_files_once_more(few_digits: Path) -> None:
    words = ("device=cpu", "data.image_size=16")
    found = asked(strategies=["ddp-after"], images=few_digits, words=words, overrides=VIT[:1])
    assert [(case.label["reduce"], case.real) for case in found] == [
        (None, False),
        (None, True),
        ("after", False),
        ("after", True),
    ]


def test_what_the_plan_refuses_is_a_row() -> None:
    alone, refused = asked(strategies=["hsdp"], overrides=(*VIT, "strategy.shard_processes=3"),
                           counts=[2])  # fmt: skip
    assert isinstance(alone, Case)
    assert "strategy.shard_processes = 3 does not divide 2" in refused[1]
    (told,) = with_speed_up([refused[0] | {"error": refused[1]}])
    assert scaling.line(told).endswith(refused[1])


@pytest.mark.parametrize(
    "strategies, message",
    [(["ddb"], "--strategies ddb: must be of dp, ddp"), (["dp"], "--strategies dp: DataParallel")],
)
def test_mistakes(strategies: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        asked(strategies=strategies)


@pytest.mark.parametrize(
    "gpus, counts", [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_counts(gpus: int, counts: list[int]) -> None:
    assert counts_up_to(gpus) == counts


def test_speed_up_is_over_one_of_the_same_precision() -> None:
    talk = {"profile": {"communication_ms": 3.0, "exposed_communication_ms": 1.0, "step_ms": 20.0}}
    rest = {"memory_bytes": 2**30}
    rows = with_speed_up(
        [
            row(100, **rest, profile=None),
            row(50, precision="fp32", **rest, profile=None),
            row(190, strategy="ddp", processes=2, **rest, **talk),
            row(150, strategy="ddp", processes=4, precision="fp32", **rest, **talk),
            row(7, strategy="ddp", precision="tf32", **rest, **talk),
            row(strategy="fsdp", error="out of memory"),
            row(80, images="/imagenet", **rest, profile=None),
            row(120, strategy="ddp", processes=2, images="/imagenet", **rest, **talk),
        ]
    )
    assert [r["speed_up"] for r in rows] == [1, 1, 1.9, 3, None, None, 1, 1.5]
    assert [r["efficiency"] for r in rows] == [1, 1, 0.95, 0.75, None, None, 1, 0.75]
    words = scaling.line(rows[2]).split()
    assert words[-8:] == ["190", "1.90x", "95.0%", "1.00", "GiB", "1.00", "ms,", "5.0%"]
    assert scaling.for_chart(rows[2])["note"] == "  1.90x, 95%"
    assert chart([scaling.for_chart(r) for r in rows], "title").height > 0


def test_the_door(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """All but the measuring, which the benchmark's tests do."""

    def measure(case: Case, *_: Any, **__: Any) -> dict[str, Any]:
        rate = 100.0 * case.label["processes"] ** 0.5
        spread = {"median": rate, "least": rate, "most": rate}
        figures = {"images_per_second": spread, "memory_bytes": None, "profile": None}
        return case.label | figures | {"roofline_images_per_second": None}

    monkeypatch.setattr(bench, "measure", measure)
    file, picture = tmp_path / "s.json", tmp_path / "s.png"
    words = "--models vit_tiny --device cpu --precisions fp32 --strategies ddp --counts 2,4"
    words += f" --image-size 16 --batch 4 --json {file} --png {picture}"
    assert door.main([*words.split(), *VIT]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert ["1.00x" in lines[1], "1.41x" in lines[2], "2.00x" in lines[3]] == [True] * 3
    assert "50.0%" in lines[3]
    assert file.exists() and picture.exists()
