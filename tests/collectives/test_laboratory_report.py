"""Formulas, fits and crossovers against numbers worked out by hand; and every surface."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from made_times import ALPHA, BETA, GAMMA, MESSAGE, START, made_raw

from stepscope.predict.collective_laboratory import (
    FORMULAS,
    analyse,
    count_terms,
    measured_crossing,
    step_loads,
)
from stepscope.records.collective_schedules import (
    ALGORITHMS,
    COLLECTIVES,
    CollectiveSchedule,
    build_schedule,
    square_groups,
)
from stepscope.records.hardware import AlgorithmTimes, LaboratoryReport, PredictedSize
from stepscope.ui.html.calibration import (
    contribution_words,
    draw_schedule,
    write_laboratory,
)
from stepscope.ui.html.render import read_page_file
from stepscope.ui.terminal.measurements import print_laboratory
from stepscope.ui.topics.measurements import crossovers_right, laboratory_answer, laboratory_json

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def report() -> LaboratoryReport:
    return analyse(made_raw(4, kinds=("all_reduce",)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_formula_is_what_the_schedule_costs(algorithm: str) -> None:
    everywhere = algorithm in ("ring", "bruck", "direct", "binomial_tree", "hierarchical")
    for kind in COLLECTIVES:
        for ranks in range(2, 17) if everywhere else (2, 4, 8, 16):
            counted = count_terms(build_schedule(algorithm, kind, ranks))
            formula = FORMULAS[algorithm, kind]
            for symbol, number in zip(
                "αβγ", (counted.steps, counted.sent, counted.added), strict=True
            ):
                assert number == pytest.approx(evaluate(formula, symbol, ranks))


def evaluate(formula: str, symbol: str, ranks: int) -> float:
    """What stands before α, β or γ in a formula as people write it, for one byte."""
    group = len(square_groups(ranks)[0])
    known: dict[str, float] = {"p": ranks, "r": group, "h": ranks // group}
    known |= {"U": (ranks - 1).bit_length(), "L": math.log2(ranks)}
    known |= {each: float(each == symbol) for each in "αβγ"}
    text = formula.replace("⌈log p⌉", "U").replace("log p", "L").replace("·", "*")
    text = re.sub(r"(?<=\d)\s*(?=[(UL])", "*", text.replace("n", ""))
    return float(eval(text, {}, known))


def test_three_ranks_fold_one_into_another() -> None:
    """halving-doubling: 1 vector in, a pair's reduce-scatter and all-gather, 1 vector out."""
    counted = count_terms(build_schedule("halving_doubling", "all_reduce", 3))
    # Rank 0 brings two chunks of three to the pair, rank 2 one.
    assert counted.steps == 4
    assert counted.sent == pytest.approx(1 + 2 / 3 + 2 / 3 + 1)
    assert counted.added == pytest.approx(1 + 2 / 3)


def test_ranks_of_a_host_share_its_link() -> None:
    """Two hosts of two: between the hosts both ranks send a quarter at once."""
    schedule = build_schedule("hierarchical", "all_reduce", 4, [[0, 1], [2, 3]])
    loads = step_loads(schedule, [[0, 1], [2, 3]])
    assert [(load.inside, load.between) for load in loads] == [
        (0.5, 0.0), (0.0, 0.5), (0.0, 0.5), (0.5, 0.0),
    ]  # fmt: skip


def test_probes_give_back_the_numbers_they_were_made_of(report: LaboratoryReport) -> None:
    link = report.link
    assert link.alpha_ns == pytest.approx(ALPHA, rel=1e-3)
    assert link.beta_ns_per_byte == pytest.approx(BETA, rel=1e-3)
    assert link.gamma_ns_per_byte == pytest.approx(GAMMA, rel=1e-3)
    assert link.message_ns == pytest.approx(MESSAGE, rel=1e-2)
    assert link.start_ns == pytest.approx(START, rel=1e-3)


def test_formulas_predict_times_that_follow_them(report: LaboratoryReport) -> None:
    errors = {times.algorithm: times.error for times in report.algorithms}
    assert errors.pop("gloo") is None
    assert set(errors) == set(ALGORITHMS)
    assert max(error for error in errors.values() if error is not None) < 0.005


def test_a_crossover_is_where_both_take_the_same(report: LaboratoryReport) -> None:
    """2 alpha more against half a vector less sent, 1.25 less added: 2e6 / (40 + 2.5) bytes."""
    (found,) = [
        one
        for one in report.crossovers
        if (one.below, one.above) == ("recursive_doubling", "halving_doubling")
    ]
    assert found.predicted_bytes == pytest.approx(2e6 / 42.5, rel=0.01)
    assert found.measured_bytes == pytest.approx(2e6 / 42.5, rel=0.25)  # read between two sizes
    assert crossovers_right(report.crossovers) == len(report.crossovers)


def times(*values: int) -> AlgorithmTimes:
    sizes = tuple(
        PredictedSize(
            size_bytes=1 << (10 + place), time_ns=ns, low_ns=ns, high_ns=ns, predicted_ns=None
        )
        for place, ns in enumerate(values)
    )
    return AlgorithmTimes(
        kind="all_reduce", algorithm="x", formula=None, steps=None, sent=None, added=None,
        sizes=sizes, error=None,
    )  # fmt: skip


def test_one_odd_size_does_not_move_a_measured_crossover() -> None:
    smooth = measured_crossing(times(1, 2, 4, 8, 16, 32), times(4, 4, 6, 6, 8, 9))
    noisy = measured_crossing(times(9, 2, 4, 8, 16, 32), times(4, 4, 6, 6, 8, 9))
    assert smooth is not None
    assert smooth == noisy
    assert 4096 < smooth < 8192


def test_times_that_never_cross_are_not_seen() -> None:
    assert measured_crossing(times(1, 2, 4), times(2, 3, 5)) is None


def test_the_terminal_shows_every_algorithm(
    report: LaboratoryReport, capsys: pytest.CaptureFixture[str]
) -> None:
    print_laboratory(report, width=100)
    shown = capsys.readouterr().out
    for name in ALGORITHMS:
        assert name.replace("_", "-") in shown
    assert "fastest direct at 4 KiB" in shown
    assert "predicted within a factor of two" in shown


def test_a_narrow_terminal_cuts_no_number(
    report: LaboratoryReport, capsys: pytest.CaptureFixture[str]
) -> None:
    print_laboratory(report, width=60)
    assert "…" not in capsys.readouterr().out


def test_noise_is_named_before_anything_else(report: LaboratoryReport) -> None:
    raw = made_raw(4, kinds=("all_reduce",))
    for probe in raw["probes"]:
        probe["passes_ns"] = [
            [[ns * (1 + place % 3) for ns in calls] for calls in one]
            for place, one in enumerate(probe["passes_ns"])
        ]
    assert "measure again when it is idle" in laboratory_answer(analyse(raw)).next


def test_json_has_exactly_these_names(report: LaboratoryReport) -> None:
    body = laboratory_json(report)
    assert list(body) == ["schema", "verdict", "why", "next", "laboratory"]
    assert set(body["laboratory"]) == {
        "host", "device", "kind", "torch", "when_unix", "backend", "world_size", "hosts", "groups",
        "checked", "link", "algorithms", "crossovers",
    }  # fmt: skip
    assert set(body["laboratory"]["link"]) == {
        "alpha_ns", "beta_ns_per_byte", "gamma_ns_per_byte", "message_ns", "start_ns", "noise",
        "hop", "pair", "inside",
    }  # fmt: skip
    assert set(body["laboratory"]["algorithms"][0]) == {
        "kind", "algorithm", "formula", "steps", "sent", "added", "error", "sizes",
    }  # fmt: skip


def test_the_page_draws_every_algorithm_and_fetches_nothing(
    report: LaboratoryReport, tmp_path: Path
) -> None:
    write_laboratory(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count('class="panel chart schedule"') == len(ALGORITHMS)
    assert "http" not in page.replace("http-equiv", "")
    assert page.count('class="dot"') == len(report.algorithms) * len(report.algorithms[0].sizes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_diagram_has_an_arrow_for_every_message(algorithm: str) -> None:
    schedule = build_schedule(algorithm, "all_reduce", 5)
    picture = ElementTree.fromstring(str(draw_schedule(schedule)))
    kinds = [path.get("class") for path in picture.iter("path")]
    drawn = sum(kind in ("diagram-add", "diagram-copy") for kind in kinds)
    assert drawn >= sum(map(len, schedule.steps))
    rows = [group.get("data-step") for group in picture.iter("g")]
    assert rows == [str(number) for number in range(1, len(schedule.steps) + 1)]


def test_partial_sums_are_named_by_their_ranks() -> None:
    assert contribution_words(frozenset({0, 2, 3})) == "0 2-3"
    assert contribution_words(frozenset()) == ""


def test_the_picture_in_the_docs_is_the_schedule_that_runs() -> None:
    drawn = draw_alone(build_schedule("ring", "all_reduce", 4))
    assert (ROOT / "docs/images/ring.svg").read_text() == drawn + "\n"


def draw_alone(schedule: CollectiveSchedule) -> str:
    """The same as a file of its own, with the page's light colours."""
    rules = [
        "svg text { font: 11px var(--font); fill: var(--muted); }",
        *(
            line
            for line in read_page_file("laboratory.css").splitlines()
            if line.startswith(("svg .diagram", "svg .shade", "svg .is-"))
        ),
    ]
    used = set(re.findall(r"var\((--[\w-]+)", "".join(rules)))
    light = read_page_file("report.css").split("}", 1)[0]
    colours = [line.strip() for line in light.splitlines() if line.strip().split(":")[0] in used]
    style = "\n".join(["<style>", f"svg {{ {' '.join(colours)} }}", *rules, "</style>"])
    drawn = str(draw_schedule(schedule))
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(
        ">", f">{style}", 1
    )
