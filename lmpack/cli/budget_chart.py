"""Budget chart: tokens per second and hit rate over the memory budget, as an SVG.

Two panels over one axis, because two scales in one panel show crossings that mean nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from lmpack.byte_size import format_nbytes
from lmpack.whole_file import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

WIDTH, HEIGHT = 720, 500
LEFT, RIGHT = 64, 680  # the panels' edges
SPEED_TOP, SPEED_BOTTOM = 100, 280
HITS_TOP, HITS_BOTTOM = 334, 438
MIN_LABEL_GAP = 60  # between two budgets that are both labelled
LABEL_HEIGHT = 24  # of a dot with the label above it
INK, QUIET, GRID, SPEED_COLOR, HITS_COLOR = "#24292f", "#6e7781", "#d8dee4", "#0969da", "#bc4c00"
OTHER_COLOR = "#57606a"


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """What was measured at one budget; the hit rate is None for a dense model.

    `other_tokens_per_s` is of the program that is compared, if there is one.
    """

    ram_nbytes: int
    tokens_per_s: float
    stdev: float
    hit_rate: float | None
    other_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class BudgetChart:
    """Points by ascending budget, at least one; `other` names the program that is compared."""

    title: str
    subtitle: str
    points: Sequence[BudgetPoint]
    other: str = ""

    def save(self, path: Path) -> None:
        """Write the SVG; a file that is there already is replaced when the new one is whole."""
        with whole_file(path) as file:
            file.write(self.draw().encode())

    def draw(self) -> str:
        """Return the SVG's text."""
        xs = _places([point.ram_nbytes for point in self.points])
        lines = [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
                'font-family="system-ui, sans-serif">'
            ),
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(LEFT, 32, self.title, INK, size=16),
            _text(LEFT, 53, self.subtitle, QUIET),
            *self._draw_speed(xs),
            *self._draw_hits(xs),
        ]
        labelled_to = -math.inf
        for x, point in zip(xs, self.points, strict=True):
            lines.append(_line(x, HITS_BOTTOM, x, HITS_BOTTOM + 5, QUIET))
            if x - labelled_to >= MIN_LABEL_GAP:
                lines.append(
                    _text(x, HITS_BOTTOM + 20, format_nbytes(point.ram_nbytes), INK, anchor="middle")
                )
                labelled_to = x
        lines.append(
            _text((LEFT + RIGHT) / 2, HITS_BOTTOM + 46, "memory budget (logarithmic)", QUIET, anchor="middle")
        )
        return "\n".join([*lines, "</svg>\n"])

    def _draw_speed(self, xs: Sequence[float]) -> list[str]:
        step, most = _nice_steps(
            max(max(point.tokens_per_s + point.stdev, point.other_tokens_per_s or 0) for point in self.points)
        )

        def height(rate: float) -> float:
            return SPEED_BOTTOM - rate / most * (SPEED_BOTTOM - SPEED_TOP)

        ticks = [step * number for number in range(round(most / step) + 1)]
        spreads = [
            _line(
                x,
                height(max(0, point.tokens_per_s - point.stdev)),
                x,
                height(point.tokens_per_s + point.stdev),
                SPEED_COLOR,
            )
            for x, point in zip(xs, self.points, strict=True)
        ]
        places = [
            (x, height(point.tokens_per_s), f"{point.tokens_per_s:.3g}")
            for x, point in zip(xs, self.points, strict=True)
        ]
        others = [
            (x, height(point.other_tokens_per_s), f"{point.other_tokens_per_s:.2g}")
            for x, point in zip(xs, self.points, strict=True)
            if point.other_tokens_per_s is not None
        ]
        return [
            _text(LEFT, SPEED_TOP - 16, "tokens per second" + (", lmpack" if others else ""), SPEED_COLOR),
            *([_text(RIGHT, SPEED_TOP - 16, self.other, OTHER_COLOR, anchor="end")] if others else []),
            *_grid((height(tick), f"{tick:g}") for tick in ticks),
            *spreads,
            *_series(others, OTHER_COLOR, beside=places),
            *_series(places, SPEED_COLOR, beside=others),
        ]

    def _draw_hits(self, xs: Sequence[float]) -> list[str]:
        def height(share: float) -> float:
            return HITS_BOTTOM - share * (HITS_BOTTOM - HITS_TOP)

        places = [
            (x, height(point.hit_rate), f"{point.hit_rate:.0%}")
            for x, point in zip(xs, self.points, strict=True)
            if point.hit_rate is not None
        ]
        return [
            _text(LEFT, HITS_TOP - 16, "hit rate", HITS_COLOR),
            *_grid((height(tick), f"{tick:.0%}") for tick in (0, 0.5, 1)),
            *_series(places, HITS_COLOR),
        ]


def _places(budgets: Sequence[int]) -> list[float]:
    """Where budgets lie on a logarithmic axis; equal ones stand in the middle."""
    logs = [math.log(nbytes) for nbytes in budgets]
    first, last = logs[0], logs[-1]
    inner = 32  # keeps the outermost labels inside
    shares = [(log - first) / (last - first) if last > first else 0.5 for log in logs]
    return [LEFT + inner + share * (RIGHT - LEFT - 2 * inner) for share in shares]


def _nice_steps(most: float) -> tuple[float, float]:
    """A step of 1, 2 or 5 times a power of ten, and its multiple that is not below `most`."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit * 4 >= most)
    return step, step * math.ceil(most / step)


def _grid(ticks: Iterable[tuple[float, str]]) -> Iterator[str]:
    for y, label in ticks:
        yield _line(LEFT, y, RIGHT, y, GRID)
        yield _text(LEFT - 8, y + 4, label, QUIET, anchor="end")


def _series(
    places: Sequence[tuple[float, float, str]], color: str, *, beside: Sequence[tuple[float, float, str]] = ()
) -> Iterator[str]:
    """A line through dots with their values above them, or below where a dot `beside` is just above."""
    if not places:
        return
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in places)
    yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
    for x, y, label in places:
        is_below = any(x == other_x and 0 <= y - other_y < LABEL_HEIGHT for other_x, other_y, _ in beside)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
        yield _text(x, y + (19 if is_below else -9), label, color, anchor="middle")


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(x: float, y: float, text: str, color: str, *, size: int = 12, anchor: str = "start") -> str:
    """Words in front of a white halo: two elements, since not every program knows `paint-order`."""
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    halo = f'<text {place} stroke="white" stroke-width="4" fill="white">{escape(text)}</text>'
    return f'{halo}<text {place} fill="{color}">{escape(text)}</text>'
