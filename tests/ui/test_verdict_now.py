"""Windows of a running job are explained in child processes that never stay behind."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from stepscope.records.folders import is_alive
from stepscope.ui.jobs import environment
from stepscope.ui.serve import job_follower
from stepscope.ui.serve.job_follower import VerdictChild

RANKS = ("rank-00000", "rank-00001")


def make_traces(folder: Path, name: str = "trace.json.gz") -> Path:
    for rank in RANKS:
        (folder / rank).mkdir(parents=True, exist_ok=True)
        (folder / rank / name).write_bytes(b"")
    return folder


def instead(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Another program in the place of `python -m stepscope explain FOLDER --json`."""
    program = folder / "program"
    program.write_text(f"#!{sys.executable}\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(environment.sys, "executable", str(program))


def wait_for_verdict(child: VerdictChild) -> None:
    until = time.monotonic() + 60
    while child.is_busy and time.monotonic() < until:
        time.sleep(0.01)
        child.look(RANKS)


ANSWER = """{"verdict": "Host-bound", "findings": [{"id": "host-bound", "summary": "s"}],
 "ranks": [{"efficiency": {"mfu": 0.4}, "memory": {"peak_bytes": 5, "largest_batch": {"batch": 8}}},
           {"efficiency": {"mfu": 0.3}, "memory": {"peak_bytes": 7}}]}"""


def test_figures_of_all_ranks_come_from_one_explanation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, tmp_path, f"print('''{ANSWER}''')")
    child = VerdictChild(make_traces(tmp_path / "run"))
    child.look(RANKS)
    assert child.is_busy
    wait_for_verdict(child)
    verdict = child.verdict
    assert verdict is not None
    assert (verdict.verdict, verdict.findings[0].id) == ("Host-bound", "host-bound")
    assert (verdict.mfu, verdict.peak_bytes, verdict.batch) == (0.3, 7, 8)
    child.look(RANKS)
    assert not child.is_busy  # the same traces are not explained again


def test_nothing_is_explained_until_every_rank_has_a_trace(tmp_path: Path) -> None:
    run = make_traces(tmp_path / "run")
    (run / RANKS[1] / "trace.json.gz").unlink()
    child = VerdictChild(run)
    child.look(RANKS)
    assert not child.is_busy
    shutil.rmtree(run)
    child.look(RANKS)
    assert not child.is_busy


@pytest.mark.parametrize(
    ("script", "words"),
    [("print('{')", "no answer that can be read"), ("raise SystemExit(4)", None)],
)
def test_an_explanation_that_fails_is_said_or_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str | None
) -> None:
    instead(monkeypatch, tmp_path, script)
    child = VerdictChild(make_traces(tmp_path / "run"))
    child.look(RANKS)
    wait_for_verdict(child)
    assert (child.verdict is None) == (words is None)
    assert child.verdict is None or words in child.verdict.verdict


def test_one_that_hangs_is_stopped_after_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead(monkeypatch, tmp_path, "import time; time.sleep(600)")
    monkeypatch.setattr(job_follower, "LONGEST_S", 0.0)
    child = VerdictChild(make_traces(tmp_path / "run"))
    child.look(RANKS)
    child.look(RANKS)
    assert child.verdict is not None
    assert "was stopped" in child.verdict.verdict


def test_closing_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, tmp_path, "import time; time.sleep(600)")
    children = [VerdictChild(make_traces(tmp_path / f"run-{number}")) for number in range(3)]
    for child in children:
        child.look(RANKS)
    assert [child.is_busy for child in children] == [True, True, False]  # two at once
    pids = [child._child.pid for child in children if child._child is not None]
    for child in children:
        child.close()
    assert [is_alive(pid) for pid in pids] == [False, False]
    children[2].look(RANKS)
    assert children[2].is_busy
    children[2].close()
