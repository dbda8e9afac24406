"""All that people read, of many inputs: one screen by default, plurals and names spelt right."""

from __future__ import annotations

import html
import re
import sys
import unicodedata
from pathlib import Path

import pytest
from msgspec.structs import replace

import snapshots
import stepscope
from jobs import Fault, Plan, make_job
from jobs_files import write_job
from stepscope.records.explanation import Explanation
from stepscope.records.quality import Note
from stepscope.ui.html.report import write_report
from stepscope.ui.terminal.explanation import print_explanation
from stepscope.ui.terminal.health import check_health, print_health
from stepscope.ui.terminal.short import GRAVE, MOST_LINES, print_short
from verb_process import run_verb

GOLDEN = Path(__file__).parent.parent / "golden"
MOST = 25  # lines of a screen; `run` prints where its folder is besides
NOUNS = (
    "blocks|blocking calls|buckets|bytes|calls|changes|collectives|devices|device events|elements|"
    "events|files|gaps|groups|hosts|kernels|launches|layers|lines|micro-batches|modules|notes|"
    "operators|pairs|parameters|passes|processes|promises|ranks|replicas|requests|runs|samples|"
    "shards|stages|steps|such kernels|tensors|threads|times as|windows|workers"
)
# "1 steps"; not "0.1 steps", "21 steps", "step 1 steps", nor "1 of 3 steps"
WRONG_PLURAL = re.compile(rf"(?<![\d.,×x-])(?<!rank )(?<!stage )1 (?:{NOUNS})\b")
WRONG_CAPITAL = re.compile(r"\b(?:Aten|Torch|Gloo|Nccl|Autograd|C10d|Void)(?:::|\.|:)")
PRIVATE = re.compile(
    r"\bown time\b|\bnot told\b|last to come|\bwho decides\b|\bdecides the step\b|worth having|"
    r"\b(?:steps|step) worth \d|\bthe accused\b|\bdoes not tell\b",
    re.IGNORECASE,
)


def rows(text: str, width: int) -> int:
    """Rows of a terminal that text takes: a path may be longer than a line."""
    return sum(max(1, -(-cells(line) // width)) for line in text.splitlines())


def cells(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in line)


def check_words(text: str) -> None:
    for wrong in (WRONG_PLURAL, WRONG_CAPITAL, PRIVATE):
        found = wrong.search(text)
        assert found is None, text[max(0, found.start() - 80) : found.end() + 40]


def check(
    explanation: Explanation, capsys: pytest.CaptureFixture[str], folder: Path
) -> dict[str, str]:
    """One screen at 80 and 100 columns with all that has to be there; all words as they should."""
    printed = {}
    for width in (80, 100):
        report = Path("stepscope-runs/20260101-120000-train/report.html").absolute()
        more = "stepscope explain stepscope-runs/20260101-120000-train --full"
        print_short(explanation, width=width, report=report, more=more)
        short = capsys.readouterr().out
        assert rows(short, width) <= MOST_LINES < MOST
        assert all(cells(line) <= width for line in short.splitlines()), short
        labels = [line.split("  ")[0] for line in short.splitlines() if line[:1].isalpha()]
        assert next(each for each in labels if each in ("verdict", "why", "next")) == "verdict"
        assert labels[-2:] == ["report", "more"]
        assert "--full" in short
        print_explanation(explanation, width=width)
        printed[f"short {width}"], printed[f"full {width}"] = short, capsys.readouterr().out
    write_report(explanation, [], folder / "report.html")
    page = (folder / "report.html").read_text()
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    printed["page"] = html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "  ", body)))
    for text in printed.values():
        check_words(text)
    check_words("\n".join(f"{f.summary}\n" + "\n".join(f.evidence) for f in explanation.findings))
    return printed


@pytest.mark.parametrize(
    "name",
    ["cpu_stack_memory", "cpu_step", "cpu_unescaped_quotes", "cuda_graph", "cuda_step"],
)
def test_golden_traces(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    check(stepscope.explain(GOLDEN / f"{name}.json.gz", cache=False), capsys, tmp_path)


def test_a_run_of_one_process_has_no_table_about_many(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    printed = check(stepscope.explain(GOLDEN / "h200-resnet18", cache=False), capsys, tmp_path)
    assert "h200-resnet18" in printed["short 80"].splitlines()[0]
    assert "ZeRO" not in printed["full 80"]
    assert "what if   saves" in printed["short 80"]
    assert "kernels" in printed["full 80"]
    assert "\nkernels\n" not in printed["short 80"]


@pytest.mark.few(8)
def test_shared_traces(
    unlike_trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    check(stepscope.explain(unlike_trace, cache=False), capsys, tmp_path)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(ranks=2, steps=4, backend="gloo"),
        Plan(ranks=2, steps=1),
        Plan(ranks=4, steps=6, rounds=20, fault=Fault(cause="compute", size=1.5, place=2)),
        Plan(ranks=4, steps=6, rounds=20, fault=Fault(cause="input", size=0.5, place=1)),
        Plan(ranks=8, steps=4, form="tensor", tensor_ranks=2),
        Plan(ranks=4, steps=4, form="fsdp"),
        Plan(ranks=4, steps=4, form="gpipe", microbatches=1),
        Plan(ranks=64, steps=3),
    ],
    ids=lambda plan: f"{plan.form}-{plan.ranks}-{plan.backend}-{plan.steps}",
)
def test_jobs(plan: Plan, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_job(tmp_path / "run", make_job(plan))
    printed = check(stepscope.explain(tmp_path / "run", cache=False), capsys, tmp_path)
    assert f"{plan.ranks} ranks" in printed["short 80"]


def test_a_snapshot_of_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = snapshots.write(tmp_path / "memory.pickle", snapshots.training().snapshot())
    printed = check(stepscope.explain(path), capsys, tmp_path)
    assert "memory    peak" in printed["short 80"]
    assert "ms a step" not in printed["short 80"]


@pytest.fixture
def step() -> Explanation:
    return stepscope.explain(GOLDEN / "cpu_step.json.gz", cache=False)


def short(explanation: Explanation, capsys: pytest.CaptureFixture[str], width: int = 80) -> str:
    print_short(explanation, width=width)
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_texts_of_any_length_stay_on_one_screen(
    step: Explanation, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    long = "word " * 400
    top = replace(step.findings[0], title=long, summary=long, evidence=(long,))
    notes = tuple(Note(id=name, detail=long) for name in sorted(GRAVE))
    saving = replace(
        step.advice[0],
        verdict="faster",
        label=long,
        baseline_ms=20.0,
        predicted_ms=12.0,
        throughput_factor=20 / 12,
        saved_low_ms=0.1,
        saved_high_ms=9.0,
    )
    advice = tuple(replace(saving, saved_ms=float(place)) for place in range(9))
    worst = replace(
        step, verdict=long, why=long, next=long, findings=(top,) * 30, quality=notes, advice=advice
    )
    text = short(worst, capsys, width)
    assert rows(text, width) <= MOST_LINES
    assert all(cells(line) <= width for line in text.splitlines())
    assert "more" in text.split("findings")[1].split("what if")[0]
    assert text.count("saves") == 3
    assert "saves 8.00 ms" in text
    assert text.count(f"--set {saving.setting}") == 3  # what can be copied never gives way


def test_findings_that_are_cut_are_counted(
    step: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    many = replace(step, findings=step.findings * 7)
    total = len(many.findings)
    text = short(many, capsys).split("findings")[1].split("what if")[0]
    shown = text.count("%")
    assert f"{total - shown} more" in text
    assert " more" not in short(step, capsys).split("findings")[1].split("what if")[0]


def test_grave_notes_are_shown_and_others_counted(
    step: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    marked = replace(step, ranks=tuple(replace(rank, quality=()) for rank in step.ranks))
    mended, noted = Note(id="mended", detail="was mended"), Note(id="noted", detail="was noted")
    alone = short(replace(marked, quality=(mended,)), capsys)
    assert "notes     was mended" in alone  # one note is printed, not counted
    two = short(replace(marked, quality=(mended, noted)), capsys)
    assert "was mended" not in two
    assert "notes     2 notes about the input: --full" in two
    cut = short(
        replace(marked, quality=(mended, Note(id="truncated", detail="the file ends early"))),
        capsys,
    )
    assert "notes     the file ends early" in cut
    assert "was mended" in cut
    both = short(
        replace(marked, quality=(mended, noted, Note(id="truncated", detail="ends early"))), capsys
    )
    assert "2 more notes about the input: --full" in both


def test_a_cut_file_says_so_on_the_first_screen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import gzip

    text = gzip.decompress((GOLDEN / "cpu_step.json.gz").read_bytes())
    path = tmp_path / "cut.json"
    path.write_bytes(text[: len(text) * 2 // 3])
    assert "cut off" in short(stepscope.explain(path), capsys).split("notes ")[1]


def test_ranks_that_are_missing_are_said_on_the_first_screen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = write_job(tmp_path, make_job(Plan(ranks=4, steps=3)))
    assert "2 of 4 ranks are here" in short(stepscope.explain(paths[:2]), capsys)


def test_the_legend_adds_up_and_leaves_no_part_out(
    step: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    share = 1 / len(step.budget.parts)
    parts = tuple(replace(part, share=share, ms=share * 100) for part in step.budget.parts)
    even = replace(step, budget=replace(step.budget, step_ms=100.0, parts=parts))
    text = short(even, capsys)
    legend = text.split("\n\n")[2].splitlines()[1:]
    assert len(legend) == 2
    assert sum(float(ms) for ms in re.findall(r"([\d.]+) ms", " ".join(legend))) == pytest.approx(
        100
    )
    assert "rest" in legend[-1]


def test_where_nothing_helps_that_is_said(
    step: Explanation, capsys: pytest.CaptureFixture[str]
) -> None:
    useless = tuple(replace(one, verdict="no difference", saved_ms=0.0) for one in step.advice[:1])
    printed = short(replace(step, advice=useless), capsys)
    assert "1 change predicted: none saves 2% or more" in printed
    assert "what if" not in short(replace(step, advice=()), capsys)


@pytest.mark.parametrize(
    "text", ["1 steps", "in 1 ranks", "(1 calls)", "Aten::mm", "its own time is", "1 such kernels"]
)
def test_the_search_for_wrong_words_finds_them(text: str) -> None:
    with pytest.raises(AssertionError):
        check_words(text)


@pytest.mark.parametrize("text", ["21 steps", "0.1 steps", "1 of 3 steps", "x1 ranks", "aten::mm"])
def test_the_search_for_wrong_words_finds_no_others(text: str) -> None:
    check_words(text)


TRAINING = """
import torch

model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = torch.optim.Adam(model.parameters())
for step in range(30):
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
"""


def test_a_run_ends_in_one_screen_that_says_where_the_report_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    done = run_verb("run", "--", sys.executable, "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    screen = done.stderr[done.stderr.index("stepscope: run folder") :]
    assert len(screen.splitlines()) <= MOST
    (report,) = [line.split()[1] for line in screen.splitlines() if line.startswith("report")]
    assert (tmp_path / report).is_file()
    assert re.search(r"more +stepscope why \S+\s+(?:· )?stepscope explain \S+ --full", screen)
    check_words(screen)


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_health_is_one_screen(
    ranks: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if ranks > 1:
        write_job(tmp_path, make_job(Plan(ranks=ranks, steps=3)))
    explanation = stepscope.explain_job(tmp_path if ranks > 1 else GOLDEN / "h200-resnet18")
    health = check_health(explanation, [{"rank": rank} for rank in range(ranks)])
    print_health(health, width=80)
    shown = capsys.readouterr().out
    assert rows(shown, 80) <= MOST
    assert shown.startswith("health")
    check_words(shown)
