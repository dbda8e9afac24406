"""The command line as a user meets it: real processes, real exit codes, nothing but one message."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verb_process import run_verb


def event(cat: str, name: str, ts: int, dur: int, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": args
    }  # fmt: skip


EVENTS = [
    event("user_annotation", "ProfilerStep#1", 0, 100),
    event("cpu_op", "aten::mm", 5, 20, **{"External id": 1, "Input Dims": [[2, 2], [2, 2]]}),
    event("cuda_runtime", "cudaLaunchKernel", 8, 4, correlation=7),
    event("kernel", "gemm", 20, 50, correlation=7, stream=7, device=0),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": EVENTS}))
    return path


def test_explain_prints_verdict_why_next_first(trace: Path) -> None:
    done = run_verb("explain", trace)
    assert done.returncode == 0, done.stderr
    labels = [line.split()[0] for line in done.stdout.splitlines() if line[:1].strip()]
    assert labels[1:4] == ["verdict", "why", "next"]
    assert done.stderr == ""


@pytest.mark.parametrize("verb", [["record"], ["record", "--json"], ["--help"], ["doctor", "-h"]])
def test_a_reader_that_leaves_ends_us_quietly(verb: list[str], tmp_path: Path) -> None:
    """As `stepscope record | head` does."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", *verb],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEPSCOPE_RECORD": str(tmp_path)},
        timeout=120,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_json_is_one_object_and_nothing_else(trace: Path) -> None:
    done = run_verb("explain", "--json", trace)
    body = json.loads(done.stdout)
    assert body["schema"] == 1
    assert body["ranks"][0]["timeline_ns"] == {
        "span": 50_000, "compute": 50_000, "exposed_comm": 0, "exposed_memory": 0, "idle": 0,
    }  # fmt: skip
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"hello", "is not JSON"),
        (b"\x00\x01\x02", "is not JSON"),
        (b'{"a": 1}', "has no traceEvents"),
        (b'{"traceEvents": []}', "holds no events"),
        (b'{"traceEvents": [', "before its first event"),
        (b'[{"ph": "X", "cat": "blink", "name": "x", "ts": 1, "dur": 1}]', "another tool"),
        (gzip.compress(b"", mtime=0)[:10], "is empty"),
    ],
)
def test_unreadable_input_is_exit_3_with_one_message(
    tmp_path: Path, content: bytes, says: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    done = run_verb("explain", path)
    assert done.returncode == 3
    assert done.stdout == ""
    assert says in done.stderr
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_file_and_empty_folder_are_exit_3(tmp_path: Path) -> None:
    assert run_verb("explain", tmp_path / "nothing.json").returncode == 3
    done = run_verb("explain", tmp_path)
    assert done.returncode == 3
    assert "holds no trace" in done.stderr


@pytest.mark.parametrize("arguments", [["explain"], ["explian", "x"], ["explain", "--what", "x"]])
def test_wrong_use_is_exit_2(arguments: list[str]) -> None:
    done = run_verb(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["explian", "x"], "Did you mean explain?"),
        (["train.py", "--lr", "1"], "stepscope run -- train.py --lr 1"),
        (["."], "stepscope explain ."),
        (["run", "--activ", "3", "--", "true"], "--active"),
        (["health", "--let-rum", "--", "true"], "--let-run"),
        (["tune", "--onli", "bf16", "--", "true"], "--only"),
        (["ab", "--pair", "2", "--", "a", "---", "b"], "--pairs"),
        (["whatif", ".", "--set", "data-loading"], "did you mean no-data-wait?"),
        (["profile", "x"], "Did you mean run?"),
        (["data-loading"], "stepscope why data-loading"),
        (["why", "host-bond"], "Did you mean host-bound?"),
        (["run", "--foo", "--", "true"], "No such option --foo."),
        (["run", "--collect", "--", "true"], "No such option --collect. `stepscope gather` joins"),
        (["run", "--check", "--let-rum", "--", "true"], "Did you mean --let-run?"),
        (["tune", "--dry-run"], "No such option --dry-run. Did you mean --list?"),
        (["tune", "--bogus", "--", "true"], "No such option --bogus."),
        (["health", "--foo", "--", "true"], "No such option --foo."),
        (["ab", "--foo", "--", "a", "---", "b"], "No such option --foo."),
        (["explain", "--output", "x", "."], "No such option --output."),
        (["run"], "Example: stepscope run -- python train.py"),
        (["top", "--interval", "soon"], "--interval 'soon': write 10m, 90s or 1h"),
        (["tune", "--memory-limit", "much", "--", "true"], "--memory-limit 'much': write 8GB"),
    ],
)
def test_a_wrong_word_gets_a_hint_before_anything_is_made(
    arguments: list[str], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_verb(*arguments)
    assert done.returncode == 2
    assert hint in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_command_that_trains_nothing_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_verb("run", "--", "true")
    assert done.returncode == 0
    assert "nothing was captured" in done.stderr
    assert [*tmp_path.iterdir()] == []
    assert run_verb("run", "--out", "kept", "--", "true").returncode == 0
    assert (tmp_path / "kept" / "run.json").exists()


@pytest.mark.parametrize("verb", [["explain"], ["explain", "--full"], ["whatif"]])
def test_lines_fit_the_columns_asked_for_and_end_in_no_blank(verb: list[str]) -> None:
    trace = Path(__file__).parents[1] / "golden" / "cuda_step.json.gz"
    lines = run_verb(*verb, trace, COLUMNS="70").stdout.splitlines()
    assert not [line for line in lines if line.endswith(" ")]
    assert len(max(run_verb("explain", trace, COLUMNS="70").stdout.splitlines(), key=len)) <= 70


def test_a_memory_limit_shows_on_the_first_screen(trace: Path) -> None:
    done = run_verb("explain", "--memory-limit", "100MB", trace)
    assert "memory    whether a batch fits in 100 MB is not known" in done.stdout


def test_traces_of_several_jobs_get_a_line_each(trace: Path, tmp_path: Path) -> None:
    later = [
        event(each["cat"], each["name"], each["ts"] + 10**9, 90, **each["args"]) for each in EVENTS
    ]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"schemaVersion": 1, "traceEvents": later}))
    done = run_verb("explain", trace, other)
    assert done.returncode == 0, done.stderr
    assert "2 traces of 2 different jobs" in done.stdout
    unbroken = "".join(done.stdout.split())  # paths may be longer than a line
    assert f"stepscopecompare{trace}{other}" in unbroken
    assert "traggler" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if ".json  " in line]
    assert [row.split()[0] for row in rows] == ["trace.json", "other.json"]
    body = json.loads(run_verb("explain", "--json", trace, other).stdout)
    assert [one["path"] for one in body["several"]] == [str(trace), str(other)]
    assert body["several"][0]["step_ms"] == pytest.approx(0.1)
    refused = run_verb("explain", trace, other, "--html", tmp_path / "x.html")
    assert (refused.returncode, "not one job" in refused.stderr) == (2, True)


def test_a_defect_of_ours_is_exit_1_and_says_how_to_report(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import stepscope.explain.rank as r\n"
        "def broken(*a): raise RuntimeError('boom')\n"
        "r.make_budget = broken\n"
    )
    inherited = os.environ.get("PYTHONPATH", "")
    done = run_verb("explain", trace, PYTHONPATH=f"{tmp_path}{os.pathsep}{inherited}")
    assert done.returncode == 1
    assert "a defect in stepscope: RuntimeError: boom" in done.stderr
    assert "Traceback" not in done.stderr


def test_unwritable_report_is_a_clear_error(trace: Path, tmp_path: Path) -> None:
    done = run_verb("explain", trace, "--html", tmp_path / "no" / "such" / "folder" / "r.html")
    assert done.returncode == 2
    assert "folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_partial_file_is_explained_and_the_loss_reported(trace: Path) -> None:
    text = trace.read_bytes()
    trace.write_bytes(text[:-40])
    body = json.loads(run_verb("explain", "--json", trace).stdout)
    (note,) = [n for n in body["ranks"][0]["quality"] if n["id"] == "truncated"]
    assert note["byte_offset"] > 0


def test_closed_pipe_is_no_traceback(trace: Path) -> None:
    command = f"{sys.executable} -m stepscope explain {trace} | head -n 0"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in done.stderr


def test_doctor_says_what_works_and_exits_0() -> None:
    done = run_verb("doctor")
    assert done.returncode == 0, done.stderr
    first, *lines = done.stdout.splitlines()
    assert first.endswith("here")
    shown = "\n".join(lines)
    for name in ("python", "reading traces", "Nsight exports", "cache", "torch", "accelerator"):
        assert name in shown


@pytest.mark.parametrize("words", [["tune", "--list"], ["run", "--with", "list"]])
def test_changes_that_can_be_applied_are_listed(words: list[str]) -> None:
    from stepscope.changes import APPLIED

    done = run_verb(*words)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[::2]] == [*APPLIED]


def test_listed_changes_are_one_json_object() -> None:
    body = json.loads(run_verb("tune", "--list", "--json").stdout)
    assert body["schema"] == 1
    assert {"id", "what", "effect", "values"} == set(body["changes"][0])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_completion_script(shell: str) -> None:
    done = run_verb("completion", shell)
    assert done.returncode == 0, done.stderr
    assert "_STEPSCOPE_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["wh"], "why"),
        (["why", "data-l"], "data-loading"),
        (["whatif", "x", "--set", "no-d"], "no-data-wait"),
        (["run", "--with", "tf32,fused"], "tf32,fused-optimizer"),
        (["run", "--act"], "--active"),
        (["whatif", "--gpus", "--pri"], "--prices"),
        (["probe", "sh"], "show"),
        (["explain", "tr"], "tr"),
    ],
)
def test_words_are_completed(words: list[str], offered: str) -> None:
    done = run_verb(
        _STEPSCOPE_COMPLETE="bash_complete",
        COMP_WORDS=" ".join(["stepscope", *words]),
        COMP_CWORD=str(len(words)),
    )
    assert offered in [line.partition(",")[2] for line in done.stdout.splitlines()], done


def test_completing_a_verb_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from stepscope.ui.cli.verbs import cli\n"
        "from click.shell_completion import ShellComplete\n"
        "names = [i.value for i in ShellComplete(cli, {}, 's', 'S').get_completions([], 'w')]\n"
        "assert names == ['why', 'whatif'], names\n"
        "heavy = {'numpy', 'msgspec', 'rich', 'jinja2', 'torch'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_is_the_package_version() -> None:
    import stepscope

    assert stepscope.__version__ in run_verb("--version").stdout
