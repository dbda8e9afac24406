"""Figures of one name are one figure: whole answers of many runs and traces.

An answer is what `explain` gives in all its forms: the record, the JSON, the terminal's text and
the report's. Every check takes any answer; a share is divided again, a sum added up again.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from html import unescape
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from explain.strategies.test_processes import capture
from jobs import Fault, Plan, make_job
from jobs_files import write_job
from shared_traces import GOLDEN, SHARED, SHARED_TRACES, VARIANTS
from stepscope.text import figures
from stepscope.text.figures import milliseconds
from stepscope.ui.api import explain_paths
from stepscope.ui.terminal.explanation import print_explanation
from stepscope.ui.topics.explanation_json import explanation_json
from stepscope.ui.words import PARTS as LABELS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stepscope.records.explanation import Explanation

EXACT, ROUNDED = 1e-6, 0.006  # in the JSON; of two decimals in a sentence
THREE_DIGITS = 0.0051  # the most that three significant digits round off
OF_THE_STEP = re.compile(r"([\d.,]+) ms of the ([\d.,]+) ms step")
# A finding's share is these parts of its rank's step.
PARTS = {
    "exposed-communication": ("exposed_comm",),
    "exposed-copies": ("exposed_memory",),
    "data-loading": ("data_loading",),
    "host-bound": ("operators", "python"),
    "profiler-overhead": ("profiler",),
    "healthy": ("compute",),
}
# Jobs that are played, not run: forms of training, both backends, healthy and not, with and without
# the steps measured outside the window.
PLAYED = {
    "ddp": Plan(ranks=4, form="ddp", noise=0.05),
    "ddp-gloo": Plan(ranks=4, form="ddp", backend="gloo", noise=0.05),
    "ddp-slow-rank": Plan(
        ranks=4, form="ddp", backend="gloo", fault=Fault(cause="compute", size=1.4, place=2)
    ),
    "ddp-slow-input": Plan(ranks=4, form="ddp", fault=Fault(cause="input", size=0.4, place=1)),
    "fsdp": Plan(ranks=4, form="fsdp"),
    "fsdp-gloo": Plan(ranks=2, form="fsdp", backend="gloo"),
    "tensor": Plan(ranks=4, form="tensor"),
    "mixed": Plan(ranks=8, form="mixed"),
    "gpipe": Plan(ranks=4, form="gpipe"),
    "1f1b": Plan(ranks=4, form="1f1b", backend="gloo"),
}
RUNS = {
    "ddp-late-rank": ("data_parallel", "0.02"),
    "fsdp2": ("fully_sharded",),
    "tensor-parallel": ("tensor_parallel",),
}
GOLDENS = [
    "h200-resnet18", "cpu_step.json.gz", "cpu_stack_memory.json.gz", "cpu_unescaped_quotes.json.gz",
    "cuda_graph.json.gz", "cuda_step.json.gz",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One explanation in every form it is given in."""

    record: Explanation
    json: dict[str, Any]
    terminal: str
    page: str

    @property
    def step_ms(self) -> float:
        return float(self.json["budget"]["step_ms"])

    def rank(self, number: int | None) -> dict[str, Any]:
        return next(rank for rank in self.json["ranks"] if rank["rank"] == number)


def answer(path: Path, folder: Path) -> Answer:
    """Explained once, in every form."""
    report = folder / "report.html"
    record = explain_paths([path], cache=False, html=report, quiet=True)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        print_explanation(record, width=200)
    found = msgspec.json.decode(msgspec.json.encode(explanation_json(record)))
    return Answer(record=record, json=found, terminal=said.getvalue(), page=_text_of(report))


def _text_of(report: Path) -> str:
    """What the report says, without scripts, styles and tags."""
    bare = re.sub(r"<(script|style)\b.*?</\1>", " ", report.read_text(), flags=re.S)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", bare)))


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.endswith(VARIANTS) else ())
        for name in SHARED_TRACES
    ],
)
def test_figures_of_a_shared_trace_agree(name: str, tmp_path: Path) -> None:
    path = SHARED / "traces" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    check(answer(path, tmp_path))


@pytest.mark.parametrize("name", GOLDENS)
def test_figures_of_a_golden_trace_agree(name: str, tmp_path: Path) -> None:
    check(answer(GOLDEN / name, tmp_path))


@pytest.mark.few(3)
@pytest.mark.parametrize("beside", [True, False], ids=["measured", "traces only"])
@pytest.mark.parametrize("name", PLAYED)
def test_figures_of_a_played_job_agree(name: str, beside: bool, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    write_job(folder, make_job(PLAYED[name]), run_folder=beside)
    check(answer(folder, tmp_path))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", RUNS)
def test_figures_of_a_run_agree(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script, *arguments = RUNS[name]
    run = capture(tmp_path / "run", script, *arguments, ranks=2, memory=True)
    check(answer(run, tmp_path))


def test_the_shared_pair_of_one_job_agrees(tmp_path: Path) -> None:
    folder = tmp_path / "pair"
    folder.mkdir()
    for rank in (0, 1):
        path = SHARED / "traces" / f"third_party/pair_rank{rank}of128.json.gz"
        if not path.is_file():
            pytest.skip(f"{path} is not on this machine")
        (folder / f"rank{rank}.json.gz").symlink_to(path)
    check(answer(folder, tmp_path))


@pytest.mark.parametrize("name", ["ddp-slow-rank", "ddp-slow-input"])
def test_a_stragglers_cost_is_its_share_of_the_step(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    write_job(folder, make_job(PLAYED[name]))
    found = answer(folder, tmp_path)
    finding = next(each for each in found.json["findings"] if each["id"] == "straggler")
    cost = found.json["stragglers"]["ranks"][0]["cost_ms"]
    assert finding["share"] * found.step_ms == near(cost)
    said = re.search(r"costs ([\d.,]+) ms of every step \(([\d.]+%)\)", finding["summary"])
    assert said
    assert said.groups() == (figures.significant(cost), figures.percent(finding["share"]))


def test_the_report_does_not_call_longer_steps_shorter(tmp_path: Path) -> None:
    """921 ms measured and 735 profiled, as a busy machine gives them."""
    folder = tmp_path / "job"
    for path in write_job(folder, make_job(PLAYED["ddp-gloo"])):
        steps = path.parent / "steps.jsonl"
        rows = [msgspec.json.decode(line) for line in steps.read_bytes().splitlines()]
        longer = [
            row if row["window"] else row | {"wall_ns": row["wall_ns"] * 5 // 4} for row in rows
        ]
        steps.write_bytes(b"\n".join(map(msgspec.json.encode, longer)))
    found = answer(folder, tmp_path)
    check(found)
    times = found.json["ranks"][0]["step_ms"]
    assert times["truth"] > times["profiled"]
    assert "steps outside it took longer" in found.page
    assert "real steps are shorter" not in found.page


def check(found: Answer) -> None:
    """Everything below, over one answer."""
    check_budgets(found)
    check_steps(found)
    check_findings(found)
    check_advice(found)
    check_strategies(found)
    check_collectives(found)
    check_critical_path(found)
    check_terminal(found)
    check_page(found)


def near(value: float, of: float = EXACT) -> Any:
    return pytest.approx(value, rel=of, abs=1e-9)


def check_budgets(found: Answer) -> None:
    """Parts add up; shares are of the step; a job's share is the mean of its ranks'."""
    ranks = found.json["ranks"]
    for budget in (found.json["budget"], *(rank["budget"] for rank in ranks)):
        assert sum(part["ms"] for part in budget["parts"]) == near(budget["step_ms"])
        for part in budget["parts"]:
            assert part["ms"] == near(part["share"] * budget["step_ms"])
    assert found.step_ms == near(max(rank["budget"]["step_ms"] for rank in ranks))
    for place, part in enumerate(found.json["budget"]["parts"]):
        shares = [rank["budget"]["parts"][place]["share"] for rank in ranks]
        assert part["share"] == near(sum(shares) / len(shares))


def check_steps(found: Answer) -> None:
    """The step of record is one: in the budget, under the efficiency, before every what-if."""
    for rank in found.json["ranks"]:
        times, step = rank["step_ms"], rank["budget"]["step_ms"]
        kept = {"measured": times["truth"], "corrected": times["corrected"]}
        assert step == near(kept.get(rank["budget"]["basis"], times["profiled"]))
        if rank["efficiency"] and rank["efficiency"]["step_ms"]:
            assert rank["efficiency"]["step_ms"] == near(step)
            check_efficiency(rank["efficiency"])
        timeline = rank["timeline_ns"]
        assert timeline["span"] == sum(timeline[name] for name in timeline if name != "span")
        assert timeline["idle"] == sum(rank["idle_ns"].values())
        assert rank["idle_ns"]["host"] == sum(rank["host_idle_ns"].values())


def check_efficiency(told: dict[str, Any]) -> None:
    """MFU and HFU are FLOPs over what the step could hold."""
    for name, flops in (("mfu", "model_flops"), ("hfu", "hardware_flops")):
        if told[name] is not None:
            could = told["peak_flops"] * told["devices"] * told["step_ms"] / 1e3
            assert told[name] == near(told[flops] / could)


def check_findings(found: Answer) -> None:
    """A share is its rank's parts, a percentage in the summary is the share, and every 'X ms of the
    Y ms step' is of that rank's step."""
    for finding in found.json["findings"]:
        if finding["of"] != "step" or finding["id"] == "straggler":
            continue
        assert 0 <= finding["share"] <= 1 + EXACT
        step = (
            found.rank(finding["rank"])["budget"]["step_ms"]
            if finding["rank"] is not None
            else (found.step_ms)
        )
        for ms, whole in _of_the_step(finding):
            assert whole == figures.significant(step)
            assert number(ms) <= number(whole)
        if finding["id"] in PARTS:
            check_parts(found, finding)


def _of_the_step(finding: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for line in (finding["summary"], *finding["evidence"]):
        yield from OF_THE_STEP.findall(line)


def number(text: str) -> float:
    return float(text.replace(",", ""))


def printed(value: float) -> Any:
    """What a number in a sentence may stand for."""
    return pytest.approx(value, rel=THREE_DIGITS, abs=ROUNDED)


def check_parts(found: Answer, finding: dict[str, Any]) -> None:
    rank = finding["rank"]
    budget = found.rank(rank)["budget"]
    parts = {part["id"]: part for part in budget["parts"]}
    assert finding["share"] == near(sum(parts[part]["share"] for part in PARTS[finding["id"]]))
    # A thread that sleeps has the share that it surely sleeps first.
    shares = re.findall(r"[\d.]+%", finding["summary"])
    assert figures.percent(finding["share"]) in shares[: 2 if "sleeps" in finding["summary"] else 1]
    if len(found.json["ranks"]) > 1:
        assert f"of rank {rank}'s step" in finding["summary"]
    if finding["id"] == "exposed-communication":
        whole = parts["exposed_comm"]["ms"]
        kinds = re.findall(r": ([\d.,]+) ms of this", str(finding["evidence"]))
        assert sum(map(number, kinds)) <= whole * (1 + THREE_DIGITS)
        assert next(_of_the_step(finding))[0] == figures.significant(whole)


def check_advice(found: Answer) -> None:
    """What is tried starts from the step that was explained, and a saving is the difference."""
    for advice in found.json["advice"]:
        step = found.rank(advice["rank"])["budget"]["step_ms"]
        assert advice["baseline_ms"] == near(step, 0.005)
        samples = advice["throughput_factor"] * advice["predicted_ms"] / advice["baseline_ms"]
        saved = advice["baseline_ms"] - advice["predicted_ms"] / samples
        assert advice["saved_ms"] == pytest.approx(saved, abs=1e-3 * advice["baseline_ms"])
    saving = re.search(r"save ([\d.,]+) of ([\d.,]+) ms", found.json["next"])
    if saving:
        baseline = found.json["advice"][0]["baseline_ms"]
        assert float(saving[2].replace(",", "")) == pytest.approx(baseline, rel=0.006, abs=ROUNDED)


def check_strategies(found: Answer) -> None:
    """Shares are of the step of record, and exposed communication adds up to the budget's."""
    strategies = found.json["strategies"]
    exposed = 0.0
    for strategy in strategies:
        if strategy["kind"] == "pipeline":
            for stage in strategy["stages"]:
                parts = stage["compute_ns"] + stage["other_comm_ns"] + stage["bubble_ns"]
                assert parts == pytest.approx(stage["step_ns"], abs=5)
                assert stage["bubble_share"] == near(stage["bubble_ns"] / stage["step_ns"], 1e-5)
            continue
        assert strategy["step_ns"] == pytest.approx(1e6 * found.step_ms, abs=1)
        assert strategy["exposed_share"] == near(strategy["exposed_ns"] / strategy["step_ns"])
        if "comm_share" in strategy:
            assert strategy["comm_share"] == near(strategy["comm_ns"] / strategy["step_ns"])
        assert strategy["exposed_ns"] <= strategy["comm_ns"] + 1
        pieces = [
            piece
            for name in ("buckets", "blocks", "layers", "uses")
            for piece in strategy.get(name, ())
        ]
        assert sum(piece["exposed_ns"] for piece in pieces) <= strategy["exposed_ns"] + len(pieces)
        exposed += strategy["exposed_ns"] / 1e6 * len(strategy["ranks"]) / len(found.json["ranks"])
    if strategies and all(each["kind"] != "pipeline" for each in strategies):
        budget = {part["id"]: part["ms"] for part in found.json["budget"]["parts"]}
        assert exposed == pytest.approx(budget["exposed_comm"], rel=0.02, abs=1e-4)


def check_collectives(found: Answer) -> None:
    """Of one rank: calls share the exposed time of the whole trace and never exceed it; where the
    device communicates, they are all of it."""
    for rank in found.record.ranks:
        told = sum(each.exposed_ns for each in rank.collectives)
        assert told <= rank.timeline.exposed_comm_ns
        if rank.launches.device_events and rank.collectives:
            assert told == rank.timeline.exposed_comm_ns


def check_critical_path(found: Answer) -> None:
    path = found.json["critical_path"]
    if path is not None:
        whole = path["end_ns"] - path["start_ns"]
        spent = sum(piece["end_ns"] - piece["start_ns"] for piece in path["pieces"])
        shares = sum(path["share_by_rank"].values()) + path["transfer_share"]
        assert shares == near(spent / whole)
        assert shares <= 1 + EXACT


def check_terminal(found: Answer) -> None:
    """The first line's step is the budget's; legend and strategies divide that one."""
    text = found.terminal
    assert milliseconds(found.step_ms) in text.splitlines()[0]
    for name, (label, *_) in LABELS.items():
        for ms, percent in re.findall(rf"{label.lower()} +([\d.,]+) ms +([\d.]+)%", text):
            part = next(part for part in found.json["budget"]["parts"] if part["id"] == name)
            assert number(ms) == pytest.approx(part["ms"], rel=THREE_DIGITS)
            assert _is_share(number(ms), percent, found.step_ms)
    check_words(found, text)


def check_page(found: Answer) -> None:
    """The report's words; and no word of shorter real steps where they are longer."""
    check_words(found, found.page)
    longer = [
        rank["step_ms"]["truth"] is not None
        and rank["step_ms"]["truth"] > rank["step_ms"]["profiled"]
        for rank in found.json["ranks"]
    ]
    assert not ("real steps are shorter" in found.page and all(longer))


def check_words(found: Answer, text: str) -> None:
    """Sentences that give a part and its share, wherever they stand."""
    steps = [found.step_ms, *(rank["budget"]["step_ms"] for rank in found.json["ranks"])]
    for ms, whole in OF_THE_STEP.findall(text):
        assert any(whole == figures.significant(step) for step in steps), (ms, whole)
    exposed = r"([\d.,]+) (s|ms|µs) of ([\d.,]+) (?:s|ms|µs) exposed \(([\d.]+)% of the step\)"
    for value, unit, _, percent in re.findall(exposed, text):
        ms = number(value) * {"s": 1e3, "ms": 1.0, "µs": 1e-3}[unit]
        assert _is_share(ms, percent, found.step_ms), (ms, percent)


def _is_share(ms: float, percent: str, step_ms: float) -> bool:
    """Within what rounding both may do."""
    rounding = _half(percent) + 100 * THREE_DIGITS * ms / step_ms
    return abs(100 * ms / step_ms - float(percent)) <= rounding + 1e-9


def _half(percent: str) -> float:
    """Half of the last digit."""
    return 0.5 * 10.0 ** -len(percent.partition(".")[2])
