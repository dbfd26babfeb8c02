"""Budget chart: an SVG whose heights are the figures."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from lmpack.cli.budget_chart import BudgetChart, BudgetPoint

if TYPE_CHECKING:
    from pathlib import Path

SVG = "{http://www.w3.org/2000/svg}"
GIB = 1 << 30


def drawn(*points: BudgetPoint, title: str = "m.lmpack") -> ElementTree.Element:
    return ElementTree.fromstring(BudgetChart(title, "how", points).draw())


def dots(chart: ElementTree.Element) -> list[tuple[float, float]]:
    return [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in chart.iter(f"{SVG}circle")]


def texts(chart: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in chart.iter(f"{SVG}text")]


def test_heights_are_proportional_and_doubled_budgets_equally_far() -> None:
    chart = drawn(*(BudgetPoint(GIB << n, 10.0 * n, 0, n / 4) for n in range(4)))
    (x0, zero), (x1, ten), (x2, twenty), (x3, thirty), *hits = dots(chart)
    assert [zero - ten, ten - twenty, twenty - thirty] == pytest.approx([zero - ten] * 3, abs=0.2)
    assert [x2 - x1, x3 - x2] == pytest.approx([x1 - x0] * 2, abs=0.2)
    assert [x for x, _ in hits] == [x0, x1, x2, x3]
    assert hits[0][1] - hits[2][1] == pytest.approx(2 * (hits[0][1] - hits[1][1]), abs=0.2)


def test_every_point_is_labelled_with_its_figures() -> None:
    shown = texts(drawn(BudgetPoint(2 * GIB, 1.25, 0.1, 0.5), BudgetPoint(4 * GIB, 12.5, 0.1, 1.0)))
    assert {"1.25", "12.5", "50%", "100%", "2.0 GiB", "4.0 GiB"} <= set(shown)


@pytest.mark.parametrize("rate", [0.003, 1.0, 4.0, 99.0, 12345.0])
def test_everything_lies_inside_the_picture(rate: float) -> None:
    chart = drawn(BudgetPoint(GIB, rate, rate / 10, 0.0), BudgetPoint(64 * GIB, rate / 2, 0, 1.0))
    width, height = map(float, chart.attrib["viewBox"].split()[2:])
    for element in chart.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(element.get(name, 0)) <= width
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(element.get(name, 0)) <= height


def test_a_dense_model_and_a_single_budget_have_a_chart_too() -> None:
    assert len(dots(drawn(BudgetPoint(GIB, 3.0, 0, None)))) == 1


def test_a_compared_program_has_a_line_of_its_own_on_the_same_scale() -> None:
    points = [BudgetPoint(GIB, 8.0, 0, None, 2.0), BudgetPoint(2 * GIB, 10.0, 0, None, 10.0)]
    chart = ElementTree.fromstring(BudgetChart("m", "how", points, other="another engine").draw())
    (x0, two), (x1, their_ten), (_, eight), (_, our_ten) = dots(chart)
    assert (their_ten, x0 < x1) == (our_ten, True)
    assert (two - our_ten) / (eight - our_ten) == pytest.approx(4, abs=0.05)
    assert {"another engine", "8", "2"} <= set(texts(chart))


def test_names_cannot_break_the_picture() -> None:
    assert "<&>.lmpack" in texts(drawn(BudgetPoint(GIB, 3.0, 0, None), title="<&>.lmpack"))


def test_a_chart_replaces_an_older_one_whole(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    path.write_text("older", encoding="utf-8")
    BudgetChart("m", "how", [BudgetPoint(GIB, 3.0, 0, None)]).save(path)
    assert ElementTree.parse(path).getroot().tag == f"{SVG}svg"
    assert list(tmp_path.iterdir()) == [path]
