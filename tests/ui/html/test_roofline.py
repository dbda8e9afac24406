"""Efficiency on the page and in the terminal: falls that add up, dots that lie where they must."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console, Group

from stepscope import explain_rank, read_trace
from stepscope.explain.verdict import judge
from stepscope.records.explanation import Budget, Part
from stepscope.records.hardware import Ceilings, DtypeUse, Efficiency, Spot, shape_words
from stepscope.text.figures import flop_rate, flops
from stepscope.ui.html.panes.efficiency import (
    LEAST_TIME,
    MOST_RANKS,
    draw_roofline,
    efficiency_view,
)
from stepscope.ui.html.report import write_report
from stepscope.ui.terminal.explanation import efficiency_sections
from stepscope.ui.topics.device_use import efficiency_headline, gaps, peak_losses
from stepscope.ui.words import PARTS

PEAK, SLOPE = 100e12, 1e12  # a device of 100 TFLOP/s in bf16 and 1 TB/s: they meet at 100


def spot(**said: Any) -> Spot:
    """A product of 2 ms at 50 TFLOP/s and 200 FLOPs per byte; or what is said."""
    given: dict[str, Any] = {
        "operator": "aten::mm",
        "shapes": "[[64, 64], [64, 64]]",
        "dtype": "bf16",
        "calls": 4.0,
        "device_ns": 2e6,
        "flops": 1e11,
        "bytes_moved": 5e8,
        "intensity": 200.0,
        "achieved_flops": 5e13,
        "ceiling_flops": PEAK,
        "roof_ns": 1e6,
        "gap_ns": 1e6,
        "bound": "compute",
        "phase": "forward",
    }
    return Spot(**given | said)


def mover(**said: Any) -> Spot:
    """An addition of 1 ms at half of the memory's rate."""
    none = {"flops": 0.0, "intensity": None, "achieved_flops": None, "ceiling_flops": None}
    told = {"operator": "aten::add", "device_ns": 1e6, "bytes_moved": 5e8, "bound": "memory"}
    return spot(**none | told | {"roof_ns": 5e5, "gap_ns": 5e5} | said)


def efficiency(*spots: Spot, **said: Any) -> Efficiency:
    """2e11 FLOPs in a step of 10 ms: MFU 20%."""
    given: dict[str, Any] = {
        "mfu": 0.2,
        "hfu": 0.2,
        "model_flops": 200_000_000_000,
        "hardware_flops": 200_000_000_000,
        "recomputed_flops": 0,
        "peak_flops": PEAK,
        "peak_source": "table",
        "dtype": "bf16",
        "unknown_share": 0.0,
        "tensor_core_share": 1.0,
        "step_ms": 10.0,
        "by_dtype": (
            DtypeUse(
                dtype="bf16",
                flops=200_000_000_000,
                device_ns=3_000_000,
                tensor_core_ns=3_000_000,
                peak_flops=PEAK,
            ),
        ),
        "ceilings": Ceilings(
            device="Test",
            flops={"fp32": 10e12, "tf32": 50e12, "bf16": PEAK, "fp16": PEAK},
            bytes_s=SLOPE,
            flops_source={},
            bytes_source="table",
            source="a data sheet",
        ),
        "spots": spots,
    }
    return Efficiency(**given | said)


@pytest.fixture
def rank(make_trace, explain):
    return explain(make_trace())


def stepped(rank, found: Efficiency | None, **shares: float):
    """A rank of these parts and a step of 10 ms."""
    ids = [part.id for part in rank.budget.parts]
    parts = tuple(
        Part(id=name, ms=10 * shares.get(name, 0.0), share=shares.get(name, 0.0)) for name in ids
    )
    budget = Budget(step_ms=10.0, parts=parts, basis="cycles")
    return replace(rank, efficiency=found, budget=budget)


def test_falls_from_the_peak_to_mfu_are_as_worked_out_by_hand(rank) -> None:
    again = spot(recomputed=True, device_ns=5e5, operator="aten::addmm")
    found = efficiency(spot(device_ns=3e6), mover(device_ns=2e6), again)
    made = peak_losses(stepped(rank, found, compute=0.6, exposed_comm=0.1, operators=0.3))
    told = {each.id: round(each.share, 9) for each in made}
    assert told == {
        "exposed_comm": 0.1,
        "operators": 0.3,
        "recomputed": 0.05,
        "moving": 0.2,
        "unknown": 0.05,  # compute 0.6 less arithmetic 0.2 and the three others
        "below": 0.1,  # products take 0.3 of the step, 0.2 of it would do
    }
    assert made[-1].left == pytest.approx(0.2)  # what remains is MFU
    assert [each.ms for each in made if each.id == "operators"] == [pytest.approx(3.0)]


@given(
    st.lists(st.floats(0.01, 1), min_size=len(PARTS), max_size=len(PARTS)),
    st.floats(0, 1),
    st.lists(st.tuples(st.floats(0, 2e7), st.booleans(), st.booleans()), max_size=5),
)
def test_falls_and_mfu_always_add_up_to_one(
    parts: list[float], of_compute: float, times: list[tuple[float, bool, bool]]
) -> None:
    shares = [part / sum(parts) for part in parts]
    mfu = of_compute * shares[list(PARTS).index("compute")]
    made = [
        replace(spot() if product else mover(), device_ns=ns, recomputed=again)
        for ns, product, again in times
    ]
    parts_told = tuple(
        Part(id=name, ms=10 * share, share=share) for name, share in zip(PARTS, shares, strict=True)
    )

    class Rank:
        efficiency = _made(made, mfu)
        budget = Budget(step_ms=10.0, parts=parts_told, basis="cycles")

    out = peak_losses(Rank)  # type: ignore[arg-type]
    # parts under two thousandths are not shown
    assert sum(each.share for each in out) + mfu == pytest.approx(1, abs=0.002 * 23)
    assert all(each.share >= 0 for each in out)
    lefts = [each.left for each in out]
    assert lefts == sorted(lefts, reverse=True)


def _made(spots: list[Spot], mfu: float) -> Efficiency:
    return efficiency(*spots, mfu=mfu)


def test_without_a_peak_nothing_falls_and_the_page_says_why(rank) -> None:
    found = efficiency(mfu=None, hfu=None, peak_flops=None, ceilings=None)
    assert peak_losses(stepped(rank, found, compute=1.0)) == []
    view = efficiency_view(stepped(rank, found, compute=1.0), drawn=True)
    assert view is not None
    assert view["mfu"] == ""
    assert "stepscope calibrate measures it" in view["sentence"]
    assert "`stepscope calibrate`" in efficiency_headline(found)


def points(svg: str, name: str) -> list[list[tuple[float, float]]]:
    """Ends of the paths of a class."""
    paths = re.findall(rf'<path class="{name}" d="M([^"]+)"', svg)
    return [[tuple(map(float, p.split())) for p in path.split("L")] for path in paths]


def dots(svg: str) -> list[tuple[float, float, float]]:
    found = re.findall(r'<circle class="dot[^"]*" cx="([\d.]+)" cy="([\d.]+)" r="([\d.]+)"', svg)
    return [tuple(map(float, each)) for each in found]


def test_a_dot_at_its_roof_lies_on_the_line_and_one_at_half_below_it() -> None:
    on_flat = spot(achieved_flops=PEAK, intensity=400.0, device_ns=4e6)
    on_slope = spot(achieved_flops=20e12, intensity=20.0, device_ns=3e6)
    half = spot(achieved_flops=PEAK / 2, intensity=400.0)
    svg = str(draw_roofline(efficiency(on_flat, on_slope, half), ())["products"])
    ((start, end),) = points(svg, "roof d-bf16")
    ((foot, ridge),) = points(svg, "roof is-memory")
    flat, slope, below = dots(svg)
    assert start == ridge  # the roofs meet
    assert start[1] == end[1] == flat[1]
    along = (slope[0] - foot[0]) / (ridge[0] - foot[0])
    assert slope[1] == pytest.approx(foot[1] + along * (ridge[1] - foot[1]), abs=0.2)
    assert below[1] > flat[1]
    assert below[0] == flat[0]


def test_a_dots_size_is_its_time_and_its_class_its_dtype() -> None:
    found = efficiency(spot(device_ns=4e6), spot(device_ns=1e6, dtype="fp32"))
    drawn = draw_roofline(found, ())
    (long, short) = (radius for _, _, radius in dots(str(drawn["products"])))
    assert long == 14.0
    assert short == pytest.approx(3 + 11 * math.sqrt(1 / 4))
    assert drawn["product_dtypes"] == ["bf16", "fp32"]
    assert 'class="dot d-fp32"' in drawn["products"]


def test_only_faster_roofs_are_offered_beside_those_used() -> None:
    told = str(draw_roofline(efficiency(spot(dtype="tf32")), ())["products"])
    assert points(told, "roof d-tf32")
    assert points(told, "roof d-bf16 is-quiet")
    assert not points(told, "roof d-fp32")
    assert "fp16, bf16  100 TFLOP/s" in told


def test_operators_without_flops_are_drawn_against_the_memory() -> None:
    drawn = draw_roofline(efficiency(spot(), mover(bytes_moved=1e9)), ())
    ((line, _),) = points(str(drawn["moving"]), "roof is-memory")
    ((_, y, _),) = dots(str(drawn["moving"]))
    assert y == line[1]  # 1e9 bytes in 1 ms is 1 TB/s
    assert len(dots(str(drawn["products"]))) == 1


def test_short_operators_are_left_out_and_counted() -> None:
    tiny = spot(device_ns=2e6 * LEAST_TIME / 3)
    drawn = draw_roofline(efficiency(spot(), tiny, tiny), ())
    assert drawn["left_out"] == 2
    assert len(dots(str(drawn["products"]))) == 1


def test_rows_that_sum_up_the_rest_are_in_the_falls_but_are_no_operators(rank) -> None:
    rest = mover(operator="(others)", device_ns=2e6, gap_ns=9e6)
    found = efficiency(spot(device_ns=3e6), rest)
    made = peak_losses(stepped(rank, found, compute=0.6, operators=0.4))
    assert {each.id: round(each.share, 9) for each in made}["moving"] == 0.2
    assert [each.operator for each in gaps(found, 5)] == ["aten::mm"]
    drawn = draw_roofline(found, ())
    assert not drawn["moving"]
    assert drawn["left_out"] == 0


def test_numbers_are_those_of_the_table_and_never_lie_on_each_other() -> None:
    made = [spot(gap_ns=1e6 - i, achieved_flops=5e13 * (1 + i / 50)) for i in range(12)]
    apart = spot(gap_ns=2e6, intensity=5.0, achieved_flops=2e12)
    svg = str(
        draw_roofline(efficiency(*made, apart), gaps(efficiency(*made, apart), 15))["products"]
    )
    told = re.findall(r'<text class="number" x="([\d.]+)" y="([\d.]+)">(\d+)<', svg)
    places = [(float(x), float(y)) for x, y, _ in told]
    assert [number for _, _, number in told][:2] == ["1", "2"]
    assert len(told) < 13
    assert all(math.dist(a, b) >= 13 for i, a in enumerate(places) for b in places[:i])


def test_a_name_cannot_put_anything_into_the_page(rank, report, tmp_path) -> None:
    evil = "aten::<script>alert(1)</script>"
    found = efficiency(spot(operator=evil), mover(operator=evil))
    path = tmp_path / "report.html"
    made = stepped(rank, found, compute=0.7, operators=0.3)
    write_report(report(made), [], path)
    text = path.read_text()
    assert "<script>alert" not in text
    assert text.count("aten::&lt;script&gt;") >= 3


def test_the_page_tells_mfu_once_and_the_gaps_in_order(rank, report, tmp_path) -> None:
    found = efficiency(spot(), mover(gap_ns=3e6, device_ns=4e6, roof_ns=1e6))
    path = tmp_path / "report.html"
    write_report(report(stepped(rank, found, compute=0.7, operators=0.3)), [], path)
    text = path.read_text()
    assert '<a href="#efficiency">Efficiency</a>' in text
    assert text.count("MFU, model FLOPs utilisation") == 1
    assert "<b>20%</b>" in text
    assert "20.0 TFLOP/s of 100 TFLOP/s in bf16, by its data sheet." in text
    table = text[text.index("Widest gaps to the roof") :]
    assert table.index("aten::add<") < table.index("aten::mm<")
    assert "64×64, 64×64" in table


def test_a_report_without_efficiency_has_no_such_section(rank, report, tmp_path) -> None:
    path = tmp_path / "report.html"
    write_report(report(replace(rank, efficiency=None)), [], path)
    assert 'id="efficiency"' not in path.read_text()


def test_of_many_ranks_only_some_have_pictures(make_trace, explain, report, tmp_path) -> None:
    one = stepped(explain(make_trace()), efficiency(spot()), compute=1.0)
    ranks = [replace(one, rank=number, path=f"rank{number}") for number in range(MOST_RANKS + 2)]
    path = tmp_path / "report.html"
    write_report(report(*ranks), [], path)
    text = path.read_text()
    assert text.count('aria-label="Roofline: FLOP/s against FLOPs per byte"') == MOST_RANKS
    assert text.count("Not drawn for this rank") == 2


def test_the_peak_of_a_slow_dtype_is_not_mistaken_for_the_devices() -> None:
    slow = efficiency(dtype="fp32", peak_flops=10e12, mfu=0.6)
    text = str(efficiency_view(_ranked(slow), drawn=False)["sentence"])  # type: ignore[index]
    assert text.endswith("That is 6.0% of what its tensor cores do in bf16 (100 TFLOP/s).")
    fast = efficiency_view(_ranked(efficiency()), drawn=False)
    assert fast is not None
    assert "tensor cores do" not in fast["sentence"]


def _ranked(found: Efficiency) -> Any:
    class Rank:
        efficiency = found
        budget = Budget(step_ms=0.0, parts=(), basis="cycles")

    return Rank


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ("[[8192, 768], [768, 2304], []]", "8192×768, 768×2304"),
        ("[[[64, 8], [64, 8]], []]", "2 tensors"),
        ("", ""),
        ("not json", "not json"),
    ],
)
def test_shapes_are_written_as_people_write_them(shapes: str, words: str) -> None:
    assert shape_words(shapes) == words


def test_amounts_have_three_figures() -> None:
    assert [flops(each) for each in (7.16e12, 1.55e11, 1408, 3.2e15)] == [
        "7.16 TFLOP",
        "155 GFLOP",
        "1.41 kFLOP",
        "3.20 PFLOP",
    ]
    assert flop_rate(989.5e12) == "990 TFLOP/s"


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_terminal_shows_mfu_dtypes_and_gaps_within_its_width(width: int) -> None:
    long = spot(operator="aten::_scaled_dot_product_cudnn_attention_backward", gap_ns=2e6)
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    found = efficiency(long, *[mover()] * 7, hfu=0.25, recomputed_flops=50_000_000_000)
    console.print(Group(*efficiency_sections(found, width=width)))
    text = out.getvalue()
    words = " ".join(text.split())
    assert "MFU 20%: 20.0 TFLOP/s of 100 TFLOP/s in bf16 (data sheet), HFU 25%" in words
    assert "66.7 TFLOP/s" in text  # 2e11 FLOPs in 3 ms
    assert text.count("aten::add") == 4  # five gaps in all
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.browser
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_in_a_browser_every_dot_is_inside_its_picture_and_nothing_is_fetched(
    golden_report, visit, theme
) -> None:
    page = visit(golden_report, color_scheme=theme)
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".roofline svg")].map((svg) => {
          const box = svg.getBoundingClientRect();
          const parts = [...svg.querySelectorAll("circle, text")];
          return parts.filter((part) => {
            const at = part.getBoundingClientRect();
            return at.left < box.left - 1 || at.right > box.right + 1
              || at.top < box.top - 1 || at.bottom > box.bottom + 1;
          }).map((part) => part.textContent);
        })"""
    )
    assert outside == [[], []]
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.fixture
def golden_report(request, tmp_path):
    golden = request.config.rootpath / "tests/golden/h200-resnet18/rank-00000/trace.json.gz"
    rank = explain_rank(read_trace(golden, cache=False))
    path = tmp_path / "report.html"
    write_report(judge((rank,), ()), [], path)
    return path
