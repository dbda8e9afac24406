"""The picture of a calibration: inside its frame, one chart for each kind, every size a point."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.predict.collective_times import fit_sweep
from stepscope.records.hardware import CollectiveFit
from stepscope.ui.html.calibration import draw_charts


def made(
    kind: str, group: str, *, alpha_ns: float = 2e4, ns_per_byte: float = 0.5, sizes: int = 8
) -> CollectiveFit:
    measured = [1 << power for power in range(10, 10 + sizes)]
    one = [[alpha_ns + ns_per_byte * each] for each in measured]
    return fit_sweep(
        kind=kind, group=group, group_size=2, sizes_bytes=measured, passes_ns=[one] * 4
    )


def test_a_chart_for_each_kind_with_all_its_groups() -> None:
    charts = draw_charts(
        [made("all_reduce", "world"), made("all_reduce", "pairs"), made("x", "world")]
    )
    assert [(chart["title"], len(chart["series"])) for chart in charts] == [
        ("all_reduce", 2),
        ("x", 1),
    ]
    assert charts[0]["svg"].count('class="dot"') == 16
    assert charts[0]["series"][1]["group"] == "pairs, 2 ranks"
    assert charts[0]["series"][0]["formula"] == "20.0 µs + bytes / 2.00 GB/s"


@given(
    alpha_ns=st.floats(100, 1e7),
    ns_per_byte=st.floats(1e-3, 100),
    sizes=st.integers(2, 19),
)
@settings(max_examples=25)
def test_everything_is_drawn_inside_the_frame(
    alpha_ns: float, ns_per_byte: float, sizes: int
) -> None:
    fit = made("all_reduce", "world", alpha_ns=alpha_ns, ns_per_byte=ns_per_byte, sizes=sizes)
    (chart,) = draw_charts([fit])
    root = ElementTree.fromstring(str(chart["svg"]))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    for path in root.iter("path"):
        places = [float(n) for n in re.findall(r"-?[\d.]+", path.attrib["d"])]
        assert all(0 <= x <= width for x in places[::2])
        assert all(-1 <= y <= height for y in places[1::2])
    labels = [text.text for text in root.iter("text") if text.attrib.get("class") == "tick"]
    assert 2 <= len(labels) <= 6
    assert labels[0] == "1 KiB"


@pytest.mark.parametrize(("sizes", "last"), [(19, "256 MiB"), (13, "4 MiB"), (7, "64 KiB")])
def test_the_largest_size_has_a_tick(sizes: int, last: str) -> None:
    (chart,) = draw_charts([made("all_reduce", "world", sizes=sizes)])
    assert f">{last}</text>" in chart["svg"]
