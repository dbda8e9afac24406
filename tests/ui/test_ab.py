"""`stepscope ab`: real commands in turns, and nothing left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "verify"))

from folders import noisy, write_run
from promises import promise
from traced import write_trace

from stepscope.errors import UsageError
from stepscope.records.prediction import Workload
from stepscope.ui.cli.ab import command
from stepscope.verify.runs import read_pairs
from stepscope.verify.track_record import open_promises, remember

TRAIN = """
    import sys, time
    import torch

    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    for step in range(int(sys.argv[2])):
        optimizer.zero_grad()
        (weight * weight).sum().backward()
        time.sleep(float(sys.argv[1]) / 1e3)
        optimizer.step()
    print("trained")
"""
# A grandchild in a session of its own, as a launcher's workers have; all of them sleep for long.
FOREVER = """
    import subprocess, sys, time

    if len(sys.argv) == 1:
        subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
    open(__file__ + ".up." + sys.argv[-1].rpartition("/")[2], "w").close()
    time.sleep(600)
"""


def ab(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "stepscope", "ab", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def done(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def script(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return file


def take_turns(folder: Path, pairs: int, a_ms: int, b_ms: int) -> tuple[Path, str, str]:
    """The folder, what was printed and what was said meanwhile."""
    train = script(folder, "train.py", TRAIN)
    out = folder / "out"
    a, b = ((sys.executable, train, ms, 60) for ms in (a_ms, b_ms))
    options = ("--pairs", pairs, "--out", out, "--wait", 30, "--json")
    code, said, told = done(ab(*options, "--", *a, "---", *b))
    assert code == 0, told
    return out, said, told


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """Steps of 5 ms against steps of 15 ms: far enough apart for any machine."""
    return take_turns(tmp_path_factory.mktemp("ab"), 1, 5, 15)


def test_the_slower_command_is_found(turns: tuple[Path, str, str]) -> None:
    body = json.loads(turns[1])
    assert body["verdict"] == "slower"
    assert body["median"]["low"] > 0.3  # a stall on a busy machine moves the mean
    assert body["b_ms"] > 15
    assert [row["name"] for row in body["config"]] == ["command"]


def test_both_commands_are_told_before_they_run(turns: tuple[Path, str, str]) -> None:
    told = [line for line in turns[2].splitlines() if "pair 1 of 1" in line]
    assert {line.partition(", ")[2][0] for line in told} == {"A", "B"}


def test_the_last_pair_has_traces_that_say_what_moved(turns: tuple[Path, str, str]) -> None:
    traced = sorted(path.parts[-3] for path in turns[0].glob("*/rank-00000/trace.json.gz"))
    assert traced == ["a-01", "b-01"]
    change = {part["id"]: part["change_ms"] for part in json.loads(turns[1])["budget"]}
    assert max(change, key=lambda name: change[name]) == "python"  # it sleeps in no operator


def test_output_of_the_commands_is_in_files(turns: tuple[Path, str, str]) -> None:
    assert (turns[0] / "a-01/output.txt").read_text() == "trained\n"
    assert "trained" not in turns[1] + turns[2]


def test_the_folder_can_be_compared_again(turns: tuple[Path, str, str]) -> None:
    from stepscope.verify.compare import compare

    found = compare(*read_pairs(turns[0]), paired=True)
    assert found.change == json.loads(turns[1])["change"]


def three_verdicts(tmp_path: Path, pairs: int, a_ms: float, b_ms: float) -> list[str]:
    """A right verdict comes 95 times in 100; two of three are then right 99 times in 100."""
    verdicts = []
    for number in range(3):
        (tmp_path / str(number)).mkdir()
        out, answer, _ = take_turns(tmp_path / str(number), pairs, a_ms, b_ms)
        body = json.loads(answer)
        assert body["paired"]
        traced = sorted(path.parts[-3] for path in out.glob("*/rank-00000/trace.json.gz"))
        assert traced == [f"a-{pairs:02}", f"b-{pairs:02}"]
        verdicts.append(body["verdict"])
    return verdicts


@pytest.mark.slow
def test_six_milliseconds_are_more_than_five(tmp_path: Path) -> None:
    verdicts = three_verdicts(tmp_path, 4, 5, 6)
    assert verdicts.count("slower") >= 2, verdicts
    assert "faster" not in verdicts


@pytest.mark.slow
def test_the_same_command_twice_is_no_difference(tmp_path: Path) -> None:
    verdicts = three_verdicts(tmp_path, 3, 5, 5)
    assert verdicts.count("no difference seen") >= 2, verdicts


def test_a_failing_command_is_refused_with_its_code_and_its_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fails = (sys.executable, "-c", "print('oh no'); raise SystemExit(7)")
    code, said, told = done(ab("--out", out, "--", *fails, "---", *fails))
    assert code == 4
    assert said == ""
    assert "ended with exit code 7" in told
    assert "output.txt" in told
    assert "oh no" in told
    assert "Traceback" not in told


def test_a_command_without_training_steps_is_refused(tmp_path: Path) -> None:
    quiet = (sys.executable, "-c", "pass")
    code, _, told = done(ab("--out", tmp_path / "out", "--", *quiet, "---", *quiet))
    assert code == 4
    assert "no training step was seen" in told
    assert "--step-on dataloader" in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "a"], "two commands with ---"),
        (["--", "a", "---", "b", "---", "c"], "two commands with ---"),
        (["--", "---", "b"], "no command before ---"),
        (["--", "a", "---"], "no command after ---"),
        (["--", "/no/such/program", "---", sys.executable], "no such command"),
        (["--", sys.executable, "---", "/no/such/program"], "no such command"),
        (["--", sys.executable, "---", "LR=1", "python", "a b.py"], "env LR=1 python 'a b.py'"),
        (["--pairs", "0", "--", "a", "---", "b"], "--pairs"),
        (["--what", "--", "a", "---", "b"], "--what"),
    ],
)
def test_wrong_use_is_exit_2(tmp_path: Path, arguments: list[str], says: str) -> None:
    out = ["--out", str(tmp_path / "out"), "--seed", "1"]
    code, _, told = done(ab(*out, *arguments))
    assert (code, "Traceback" in told) == (2, False)
    assert says in told
    assert not (tmp_path / "out").exists()  # neither command has run for nothing


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    code, _, told = done(ab("--out", tmp_path, "--", sys.executable, "---", sys.executable))
    assert code == 2
    assert "is not empty" in told


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_ab_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    forever = script(tmp_path, "forever.py", FOREVER)
    command = (sys.executable, forever)
    process = ab("--out", tmp_path / "out", "--", *command, "---", *command)
    up = [tmp_path / "forever.py.up.child", tmp_path / "forever.py.up.forever.py"]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in up) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    assert done(process)[0] == code
    left = subprocess.run(["pgrep", "-f", str(forever)], capture_output=True, text=True)
    assert left.stdout == ""


# Promises


@pytest.fixture
def made_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of running a command, write the run folder it would leave: --fused is faster."""
    seeds = iter(range(1000))

    def capture_run(
        words: Sequence[str], folder: Path, *, step_on: str, window: int | None
    ) -> None:
        del step_on
        fused = "--fused" in words
        argv = [words[1], *words[2:]]
        write_run(folder, noisy(16.4 if fused else 20.0, seed=next(seeds)), argv=argv)
        if window is not None:
            write_trace(folder / "rank-00000", optimizer="fused" if fused else "loop")

    monkeypatch.setattr("stepscope.ui.jobs.capture.capture_run", capture_run)


def take_made_turns(out: Path, *options: str, b: Sequence[str] = ("--fused",)) -> dict[str, Any]:
    commands = ("--", sys.executable, "train.py", "---", sys.executable, "train.py", *b)
    done = CliRunner().invoke(
        command, ["--out", str(out), "--json", *options, *commands], standalone_mode=False
    )
    if done.exception:
        raise done.exception
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def promise_about(workload: dict[str, Any], setting: str = "optimizer=fused") -> None:
    remember(promise(setting, id="abc", workload=Workload(**workload)))


@pytest.mark.usefixtures("made_turns")
def test_ab_answers_the_promise_that_its_commands_try(tmp_path: Path) -> None:
    first = take_made_turns(tmp_path / "first", "--pairs", "3")
    assert first["promise"] is None
    promise_about(first["workload"])
    answered = take_made_turns(tmp_path / "second", "--pairs", "3")["promise"]
    assert answered["delivery"]["seen"] == ["optimizer loop -> fused"]
    assert answered["delivered_ms"] == pytest.approx(16.4, rel=0.02)
    assert open_promises() == ()


@pytest.mark.usefixtures("made_turns")
def test_ab_of_one_command_twice_answers_nothing(tmp_path: Path) -> None:
    first = take_made_turns(tmp_path / "first", "--pairs", "2")
    promise_about(first["workload"])
    again = take_made_turns(tmp_path / "second", "--pairs", "2", "--promise", "abc", b=())
    assert again["promise"] is None
    assert "B does not show" in again["open_promises"][0]["why"]
    assert len(open_promises()) == 1


@pytest.mark.usefixtures("made_turns")
def test_without_traces_the_user_says_which_promise_it_is(tmp_path: Path) -> None:
    first = take_made_turns(tmp_path / "first", "--pairs", "2")
    promise_about(first["workload"])
    untraced = take_made_turns(tmp_path / "second", "--pairs", "2", "--no-trace")
    assert "--prediction abc records its result" in untraced["open_promises"][0]["why"]
    named = take_made_turns(tmp_path / "third", "--pairs", "2", "--no-trace", "--promise", "abc")[
        "promise"
    ]
    assert named["delivery"]["named"]


@pytest.mark.usefixtures("made_turns")
def test_a_full_disk_is_said_and_what_is_finished_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    write_bytes = Path.write_bytes

    def refuse(self: Path, data: bytes) -> int:
        if self.name.startswith(".ab.json@") and (out / "b-03").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))
        return write_bytes(self, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(UsageError, match="no space left on device; stepscope compare") as raised:
        take_made_turns(out, "--pairs", "3")
    assert raised.value.exit_code == 2
    assert [len(side) for side in read_pairs(out)] == [2, 2]


@pytest.mark.usefixtures("made_turns")
def test_an_id_that_does_not_exist_is_said_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prediction has that id"):
        take_made_turns(tmp_path / "out", "--promise", "zz")
    assert not (tmp_path / "out").exists()
