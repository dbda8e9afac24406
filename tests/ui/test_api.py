"""stepscope from Python: the verbs as functions, short to look at, and the examples of the docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import stepscope
from jobs import Plan, make_job
from jobs_files import write_job
from stepscope.records.comparison import Comparison
from stepscope.records.explanation import Explanation
from stepscope.records.prediction import Prediction
from stepscope.ui.topics.explanation_json import explanation_json
from verb_process import run_verb

RUN = Path(__file__).parent.parent / "golden/h200-resnet18"
DOCS = Path(__file__).parent.parent.parent / "docs/reference/python.md"


@pytest.fixture(scope="module")
def run() -> Explanation:
    return stepscope.explain(RUN, cache=False)


def test_explain_gives_what_the_verb_gives_with_advice(run: Explanation) -> None:
    done = run_verb("explain", RUN, "--json", "--no-cache")
    assert done.returncode == 0, done.stderr
    assert run.advice
    assert explanation_json(run)["verdict"] in done.stdout
    assert run.next in done.stdout


def test_explain_takes_a_path_a_string_or_several_and_survives_imports_of_its_room(
    tmp_path: Path,
) -> None:
    paths = write_job(tmp_path, make_job(Plan(ranks=2, steps=3)))
    import stepscope.explain.explain_job as room  # the package of the same name stays a package

    assert room.explain_job is stepscope.explain_job
    together = stepscope.explain([paths[0], str(paths[1])])
    assert [rank.rank for rank in together.ranks] == [0, 1]
    assert stepscope.explain(str(tmp_path)).verdict == together.verdict
    assert stepscope.explain(tmp_path).verdict == together.verdict


def test_memory_limit_is_bytes_or_words() -> None:
    words = stepscope.explain(RUN, memory_limit="4GB").ranks[0].memory
    number = stepscope.explain(RUN, memory_limit=4_000_000_000).ranks[0].memory
    assert words is not None
    assert number is not None
    assert words.limit_bytes == number.limit_bytes == 4_000_000_000


def test_whatif_takes_changes_as_text_and_as_keywords() -> None:
    text = stepscope.whatif(RUN, "precision=bf16", "batch=x2")
    words = stepscope.whatif(str(RUN), precision="bf16", batch="x2", cuda_graphs=False)
    assert isinstance(text, Prediction)
    assert text.predicted_ms == words.predicted_ms
    assert [str(each) for each in text.settings] == ["precision=bf16", "batch=x2"]
    remedies = stepscope.whatif(RUN, "batch=x2", bf16=True)
    assert remedies.predicted_ms == text.predicted_ms
    graphs = stepscope.whatif(RUN, cuda_graphs=True)
    assert [str(each) for each in graphs.settings] == ["cuda-graphs"]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ((), stepscope.UsageError, "needs a change"),
        (("precison=bf16",), stepscope.UsageError, "did you mean precision"),
        (("batch=x2", "batch=x4"), stepscope.UsageError, "given twice"),
        (("no-straggler",), stepscope.NotCapturedError, "all ranks"),
    ],
)
def test_wrong_changes_are_clear_errors(
    changes: tuple[str, ...], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        stepscope.whatif(RUN, *changes)


def test_compare_sees_no_difference_between_a_run_and_itself() -> None:
    found = stepscope.compare(RUN, [RUN])
    assert isinstance(found, Comparison)
    assert found.verdict == "no difference seen"
    assert found.promise is None


def test_a_missing_file_is_an_error_that_can_be_caught(tmp_path: Path) -> None:
    for call in (stepscope.explain, stepscope.whatif, stepscope.compare):
        arguments = {"whatif": ("compile",), "compare": (tmp_path / "b",)}
        with pytest.raises(stepscope.StepscopeError):
            call(tmp_path / "a", *arguments.get(getattr(call, "__name__", ""), ()))


def test_reports_of_an_explanation_a_comparison_and_a_path(
    run: Explanation, tmp_path: Path
) -> None:
    one = stepscope.write_report(run, tmp_path / "one.html")
    two = stepscope.write_report(RUN, str(tmp_path / "two.html"))
    both = stepscope.write_report(stepscope.compare(RUN, RUN), tmp_path / "both.html")
    assert [one, two] == [tmp_path / "one.html", tmp_path / "two.html"]
    payloads = [re.findall(r'id="payload-0">([^<]+)<', path.read_text()) for path in (one, two)]
    assert payloads[0] == payloads[1]  # the same timeline, drawn again
    assert "No difference seen" in both.read_text()
    with pytest.raises(stepscope.UsageError, match="its folder does not exist"):
        stepscope.write_report(run, tmp_path / "no/such/folder.html")


def test_a_report_of_traces_that_have_gone_keeps_its_tables(
    run: Explanation, tmp_path: Path
) -> None:
    gone = replace(run, ranks=tuple(replace(rank, path="/gone/trace.json") for rank in run.ranks))
    assert run.verdict[:20] in stepscope.write_report(gone, tmp_path / "report.html").read_text()


def test_results_are_a_line_or_two_to_look_at(run: Explanation) -> None:
    prediction = stepscope.whatif(RUN, "precision=bf16")
    results = (run, run.ranks[0], prediction, stepscope.compare(RUN, RUN))
    for result in results:
        text = repr(result)
        assert text.startswith(f"<{type(result).__name__}: ")
        assert len(text) <= 240
        assert "\n" not in text
        assert re.search(r"ms (?:a|per) step", text)
    assert run.verdict.rstrip(".") in repr(run)
    assert repr(prediction).startswith("<Prediction: precision=bf16; 24.9 -> ")
    long = replace(run, verdict="x" * 5000)
    assert len(repr(long)) < 240


def test_cards_for_notebooks_are_small_escaped_and_fetch_nothing(run: Explanation) -> None:
    evil = replace(run, verdict="<script>alert(1)</script>", why='"><img src=x onerror=y>')
    prediction = stepscope.whatif(RUN, "precision=bf16")
    for result in (evil, replace(prediction, assumptions=("<b>",)), stepscope.compare(RUN, RUN)):
        html = result._repr_html_()
        assert len(html) < 6000
        for forbidden in ("<script", "<img", "http", "url(", "src=", "<b>"):
            assert forbidden not in html.replace("src=x", ""), forbidden
    assert "&lt;script&gt;" in evil._repr_html_()
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", run._repr_html_())]
    assert sum(widths) == pytest.approx(100, abs=2)


def test_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, as a reader would type them, beside two run folders."""
    for name in ("before", "after"):
        (tmp_path / name).symlink_to(RUN)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    shared: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(DOCS), "exec"), shared)
    assert (tmp_path / "report.html").stat().st_size > 10_000
