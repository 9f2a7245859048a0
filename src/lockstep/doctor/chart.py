"""A bar chart of a benchmark: a panel for each model, a bar for each way, the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from lockstep.doctor.bench import way_of
from lockstep.doctor.case import LOCKSTEP

_PAPER, _INK, _PALE, _GRID = (255, 255, 255), (20, 20, 20), (110, 110, 110), (225, 225, 225)
_OURS, _THEIRS, _ROOF = (31, 105, 175), (165, 175, 185), (190, 30, 30)
_WIDTH, _MARGIN, _BAR, _GAP, _TITLE, _FOOT = 1400, 24, 30, 12, 64, 40
_TEXT, _SMALL, _LARGE = 20, 17, 26


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Image.Image:
    """Images/s of the rows that were measured, those of each model by the same scale.

    A thin line on a bar spans its repeats; a row's ``note`` follows its figure. The roofline is the GPU's stated arithmetic alone: what
    the FLOPs of forward and backward would take if nothing else took time.
    """
    panels: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "error" not in row:
            panels.setdefault((row["model"], row["image_size"]), []).append(row)
    heights = [_TITLE + len(bars) * (_BAR + _GAP) + _FOOT for bars in panels.values()]
    page = Image.new("RGB", (_WIDTH, 2 * _MARGIN + _LARGE + sum(heights)), _PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((_MARGIN, _MARGIN // 2), title, _PALE, _font(_SMALL))
    labels = [_label(row) for bars in panels.values() for row in bars]
    left = _MARGIN + 12 + int(max((draw.textlength(x, _font(_TEXT)) for x in labels), default=0))
    top = _MARGIN + _LARGE
    for (model, size), height in zip(panels, heights, strict=True):
        draw.text((_MARGIN, top + 12), f"{model}, {size} px", _INK, _font(_LARGE))
        _panel(draw, panels[model, size], left, top + _TITLE)
        top += height
    return page


def _panel(
    draw: ImageDraw.ImageDraw, bars: Sequence[Mapping[str, Any]], left: int, top: int
) -> None:
    roofs = sorted({r for row in bars if (r := row["roofline_images_per_second"]) is not None})
    most = max([row["images_per_second"]["most"] for row in bars] + roofs)
    told = max(draw.textlength(_value(row), _font(_TEXT)) for row in bars)
    scale = (_WIDTH - left - _MARGIN - 24 - told) / most
    bottom = top + len(bars) * (_BAR + _GAP)
    for tick in _ticks(most):
        x = left + tick * scale
        draw.line((x, top - 4, x, bottom), _GRID, 1)
        draw.text((x, bottom + 4), f"{tick:,.0f}", _PALE, _font(_SMALL), anchor="ma")
    draw.text((left - 12, bottom + 4), "images/s", _PALE, _font(_SMALL), anchor="ra")
    for i, row in enumerate(bars):
        y, rate = top + i * (_BAR + _GAP), row["images_per_second"]
        middle = y + _BAR / 2
        draw.text((left - 12, middle), _label(row), _INK, _font(_TEXT), anchor="rm")
        ours = row["way"] == LOCKSTEP
        end = left + rate["median"] * scale
        draw.rectangle((left, y, end, y + _BAR), _OURS if ours else _THEIRS)
        draw.line(
            (left + rate["least"] * scale, middle, left + rate["most"] * scale, middle), _INK, 2
        )
        beside = max(end, left + rate["most"] * scale) + 8
        draw.text((beside, middle), _value(row), _INK, _font(_TEXT), anchor="lm")
    for roof in roofs:
        x = left + roof * scale
        for i, row in enumerate(bars):
            if row["roofline_images_per_second"] == roof:  # more GPUs, another roof
                for y in range(top + i * (_BAR + _GAP) - 8, top + (i + 1) * (_BAR + _GAP) - 8, 7):
                    draw.line((x, y, x, y + 3), _ROOF, 2)
        side = "rd" if x > _WIDTH / 2 else "ld"
        draw.text((x, top - 10), f"compute roofline {roof:,.0f}", _ROOF, _font(_SMALL), side)


def _label(row: Mapping[str, Any]) -> str:
    of = "GPUs" if row.get("gpu") else "processes"
    return way_of(row) + (f", {row['processes']} {of}" if row["processes"] > 1 else "")


def _value(row: Mapping[str, Any]) -> str:
    return f"{row['images_per_second']['median']:,.0f}{row.get('note', '')}"


def _ticks(most: float) -> list[float]:
    """Round numbers from 0, about six of them."""
    rough = most / 6
    power: float = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 0.1
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    return [i * step for i in range(int(most / step) + 1)]


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
