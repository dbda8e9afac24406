"""`stepscope top`: what it shows, at every size, and how it behaves in terminals and pipes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.cells import cell_len

from live_runs import (
    BEGAN_NS,
    BEGAN_S,
    MS,
    alive,
    gone,
    make_rows,
    write_rank,
    write_run,
    write_steps,
)
from stepscope.explain.whole_run.live import explain_live
from stepscope.records.run import LiveRun
from stepscope.trace.run_folder.follow_run import RunFollower
from stepscope.ui.cli.top import live_json
from stepscope.ui.terminal.live import KEYS, live_lines
from verb_process import run_verb

STEPS = 400


def write_rank_steps(folder: Path, slower_ms: float, *, began_ns: int) -> float:
    """Every fourth step waits for data, every hundredth evaluates; from step 300 on a step takes
    20 ms more. The time at which the last one ended."""
    data = [40 * MS if n % 4 == 3 else MS for n in range(STEPS)]
    evaluation = [500 * MS if n % 100 == 99 else 0 for n in range(STEPS)]
    walls = [
        (20.0 if n < 300 else 40.0) + slower_ms + (data[n] + evaluation[n]) / MS + 3000 * (n == 0)
        for n in range(STEPS)
    ]
    rows = make_rows(
        walls,
        began_ns=began_ns,
        data_ns=data,
        evaluation_ns=evaluation,
        first=[n == 0 for n in range(STEPS)],
        window=[150 <= n < 155 for n in range(STEPS)],
        allocated_bytes=[10**9] * STEPS,
    )
    write_steps(folder, rows)
    return float(rows[-1]["end_unix_ns"]) / 1e9


@pytest.fixture
def two_ranks(tmp_path: Path) -> LiveRun:
    folder = tmp_path / "run"
    write_run(folder, process=alive(), command=["torchrun", "train.py"])
    for rank, slower_ms in ((0, 0.0), (1, 3.0)):
        place = folder / f"rank-0000{rank}"
        write_rank(place, rank=rank, process=alive(), world_size=2)
        end = write_rank_steps(place, slower_ms, began_ns=BEGAN_NS + 2 * 10**9)
    return explain_live(RunFollower(folder).read(), end + 1)


def shown(run: LiveRun, width: int, height: int | None = None, keys: str = "") -> str:
    return "\n".join(line.plain.rstrip() for line in live_lines(run, width, height, keys=keys))


AT_80 = """\
run · 2 ranks · 23.5 s
status    training: the last step ended 1.00 s ago
command   torchrun train.py
steps     400 steps · 20.5 a second now · 22.8 on average · 1 window recorded
step      mean 43.9 ms (38.2 to 49.7) · median 24.0 ms · p99 121 ms
          longest 583 ms · rank 1
          ╳╳████████████████████████████████████████████████████████████████████
          ╳ data 1.00 ms 3.4%  █ forward 28.1 ms 97%
over time ▂▃▂▂▃▂▃▂▂▃▂▃▂▂▃▂▃▇▂▃▂▃▂▃▂▂▃▂▃▂▃▂▂▃▇▃▂▂▃▂▃▂▃▂▂▃▂▃▂▂▃▂█▃▃▄▃▄▃▃▄▃▄▃▃▄▃▄▃█
          dddddddddddddddddeddddddddddddddddedddddddddddddddddedddddddddddddddde
last 200  ▁▂▂▁▂▂▂▁▂▂▁▂▂▂▁▂▂▁▂▂▂▁▂▂▁▂▂▂▁▂▂▁▂▂█▂▃▃▂▃▃▃▂▃▃▂▃▃▃▂▃▃▂▃▃▃▂▃▃▂▃▃▃▂▃▃▂▃▃█
stalls    d data stalls     9.73 ms a step   22%  98 steps, every 4
          e evaluation      5.09 ms a step   12%  4 steps, every 100
changes   step 300: 24.0 -> 44.0 ms (1.8 times)
so far    goodput 68% · start-up 22% · evaluation 8.9%
          stepscope's profiling 0.7%
memory    the process has 1.00 GB when the last step ended

 rank     steps  now/s      mean       p99 stalls  over time
    1       400   20.5   43.9 ms    121 ms    34%  ▃▃▃▃▃▃▃▆▃▃▃▃▃▃▆▃▃▃▃▃▃▇▄▅▅▄▅▄▇
    0       400   21.1   40.9 ms    118 ms    36%  ▃▃▃▃▃▃▃▆▃▃▃▃▃▃▆▃▃▃▃▃▃▇▅▅▅▅▅▅█
spread    rank 1 takes 43.9 ms, 1.07 times rank 0
q quits · p pauses"""

AT_60 = """\
run · 2 ranks · 23.5 s
status    training: the last step ended 1.00 s ago
command   torchrun train.py
steps     400 steps · 20.5 a second now · 22.8 on average
          1 window recorded
step      mean 43.9 ms (38.2 to 49.7) · median 24.0 ms
          p99 121 ms · longest 583 ms · rank 1
          ╳╳████████████████████████████████████████████████
          ╳ data 1.00 ms 3.4%  █ forward 28.1 ms 97%
over time ▃▃▃▃▃▃▃▃▃▃▃▃▇▃▃▃▃▃▃▃▃▃▃▃▇▃▃▃▃▃▃▃▃▃▃▃▃█▄▄▄▄▄▄▄▄▄▄▄█
          ddddddddddddedddddddddddeddddddddddddeddddddddddde
last 200  ▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂█▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃█
stalls    d data stalls     9.73 ms a step   22%  every 4
          e evaluation      5.09 ms a step   12%  every 100
changes   step 300: 24.0 -> 44.0 ms (1.8 times)
so far    goodput 68% · start-up 22% · evaluation 8.9%
          stepscope's profiling 0.7%
memory    the process has 1.00 GB when the last step ended

 rank     steps  now/s      mean       p99 stalls  over time
    1       400   20.5   43.9 ms    121 ms    34%  ▃▂▃▂▃▂▃▄▄
    0       400   21.1   40.9 ms    118 ms    36%  ▂▂▃▂▃▂▄▄▄
spread    rank 1 takes 43.9 ms, 1.07 times rank 0"""


def test_a_run_of_two_ranks_on_80_columns(two_ranks: LiveRun) -> None:
    assert shown(two_ranks, 80, keys=KEYS) == AT_80


def test_the_page_shows_what_is_printed() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/cli/top.md").read_text()
    assert AT_80.partition("\nsteps ")[2] in page


def test_a_run_of_two_ranks_on_60_columns(two_ranks: LiveRun) -> None:
    assert shown(two_ranks, 60) == AT_60


@pytest.mark.parametrize("height", [4, 12, 16, 19, 22, 40])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_screen_is_never_larger_than_the_terminal(
    two_ranks: LiveRun, width: int, height: int
) -> None:
    many = replace(two_ranks, ranks=two_ranks.ranks * 40, notes=("a note",) * 2)
    for run in (two_ranks, many):
        lines = live_lines(run, width, height, keys=KEYS)
        assert len(lines) <= height
        assert max(cell_len(line.plain) for line in lines) <= width
        assert lines[-1].plain == KEYS


def test_many_ranks_show_the_slowest_and_count_the_others(two_ranks: LiveRun) -> None:
    many = replace(two_ranks, ranks=two_ranks.ranks * 40)
    lines = shown(many, 80, 30).splitlines()
    assert "   71 more, faster" in lines
    assert sum(line.startswith("    1 ") for line in lines) == 9


def test_a_run_that_starts(tmp_path: Path) -> None:
    write_run(tmp_path / "run", process=alive())
    run = explain_live(RunFollower(tmp_path / "run").read(), BEGAN_S + 3)
    assert shown(run, 80) == (
        "run · 3.00 s\n"
        "status    starting up: no step has ended\n"
        "command   python train.py"
    )  # fmt: skip


def test_attempts_are_listed_after_the_one_that_runs(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, process=alive())
    write_rank(folder / "rank-00000", process=gone())
    write_steps(folder / "rank-00000", make_rows([100.0] * 50))
    write_rank(folder / "rank-00000.2", process=alive())
    later = make_rows([20.0] * 50, began_ns=BEGAN_NS + 10 * 10**9)
    write_steps(folder / "rank-00000.2", later)
    run = explain_live(RunFollower(folder).read(), BEGAN_S + 12)
    lines = shown(run, 80).splitlines()
    assert lines[0] == "run · attempt 2 · 12.0 s"
    assert lines[-1] == "attempt   1 ended after 50 steps in 5.00 s, 100 ms a step"


def test_names_cannot_move_the_cursor(tmp_path: Path) -> None:
    write_run(tmp_path / "run", process=alive(), command=["python", "\x1b[2Jtrain\n.py"])
    run = explain_live(RunFollower(tmp_path / "run").read(), BEGAN_S + 3)
    assert "\x1b" not in shown(run, 80)
    assert len(shown(run, 80).splitlines()) == 3


# JSON.


def test_json_has_the_figures_of_the_screen(two_ranks: LiveRun) -> None:
    answer: dict[str, Any] = json.loads(json.dumps(live_json(two_ranks)))
    assert (answer["schema"], answer["status"]) == (1, "training")
    assert answer["spread"] == pytest.approx(44.0 / 41.0, abs=0.01)
    slow = answer["ranks"][1]
    assert (slow["rank"], slow["steps"], slow["windows"]) == (1, 400, 1)
    assert slow["times"]["mean_ms"] == pytest.approx(44.0, abs=0.1)
    assert [stall["cause"] for stall in slow["stalls"]] == ["data", "evaluation"]
    assert slow["changes"][0]["step"] == 300
    assert "series" not in slow
    assert answer["earlier"] == []


# The command.


def command(*words: object, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_verb("top", *words, cwd=folder, **environment)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """A run whose last step ended just now."""
    folder = tmp_path / "stepscope-runs/20260101-000000-train"
    now = time.time()
    write_run(folder, process=alive(), started_unix=now - 30)
    write_rank(folder / "rank-00000", process=alive())
    rows = make_rows([50.0] * 100, began_ns=round(1e9 * (now - 5)))
    write_steps(folder / "rank-00000", rows)
    return folder


def test_a_pipe_gets_the_newest_run_once(running: Path, tmp_path: Path) -> None:
    done = command(folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "20260101-000000-train" in done.stdout
    assert "mean 50.0 ms" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_is_one_object(running: Path, tmp_path: Path) -> None:
    done = command(running, "--json", folder=tmp_path)
    assert json.loads(done.stdout)["ranks"][0]["steps"] == 100


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "this folder has no run under stepscope-runs"),
        (("nowhere",), 3, "nowhere does not exist"),
        (("--interval", "0"), 2, "not in the range"),
    ],
)
def test_a_wrong_call_is_one_message(
    tmp_path: Path, words: tuple[str, ...], code: int, message: str
) -> None:
    done = command(*words, folder=tmp_path)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


class Terminal:
    """The command in a terminal of 80 by 24."""

    def __init__(self, *words: object, **environment: str) -> None:
        pid, self._terminal = pty.fork()
        if not pid:
            os.environ.update({"TERM": "xterm-256color", **environment})
            os.environ.pop("COLUMNS", None)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # jobs in the background ignore it
            os.execv(sys.executable, [sys.executable, "-m", "stepscope", "top", *map(str, words)])
        self.pid = pid
        self.resize(80, 24)
        self.output = ""

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def read_until(self, holds: Callable[[str], bool], seconds: float = 30) -> str:
        """What has been written since the last time."""
        text, end = b"", time.monotonic() + seconds
        while time.monotonic() < end and not holds(text.decode("utf-8", "replace")):
            if select.select([self._terminal], [], [], 0.2)[0]:
                try:
                    text += os.read(self._terminal, 1 << 16)
                except OSError:  # the command has ended
                    break
        self.output += text.decode("utf-8", "replace")
        return text.decode("utf-8", "replace")

    def end(self) -> int:
        """Its exit code; a command that goes on is killed."""
        self.read_until(lambda _: False)
        for _ in range(100):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)


@pytest.fixture
def open_terminal() -> Any:
    opened: list[Terminal] = []

    def start(*words: object, **environment: str) -> Terminal:
        opened.append(Terminal(*words, **environment))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_keys_pause_and_quit_and_the_last_screen_stays(running: Path, open_terminal: Any) -> None:
    terminal = open_terminal(running, "--interval", "0.2")
    assert "\x1b[?1049h" in terminal.read_until(lambda text: "q quits" in text)
    terminal.press("p")
    terminal.read_until(lambda text: "paused" in text)
    terminal.press("q")
    assert terminal.end() == 0
    after = terminal.output.rpartition("\x1b[?1049l")[2]  # the screen of the shell
    assert "mean 50.0 ms" in plain(after)
    assert "q quits" not in after


def test_a_run_that_ends_ends_the_command(running: Path, open_terminal: Any) -> None:
    terminal = open_terminal(running, "--interval", "0.2")
    terminal.read_until(lambda text: "training" in text)
    write_run(running, code=0, ended_s=time.time())
    assert terminal.end() == 0
    assert "finished: the command ended with exit code 0" in plain(terminal.output)


@pytest.mark.parametrize(("press", "code"), [("\x03", 0), (signal.SIGTERM, 143)])
def test_interrupts_leave_the_terminal_as_it_was(
    running: Path, open_terminal: Any, press: Any, code: int
) -> None:
    terminal = open_terminal(running)
    terminal.read_until(lambda text: "q quits" in text)
    if isinstance(press, str):
        terminal.press(press)
    else:
        os.kill(terminal.pid, press)
    assert terminal.end() == code
    assert "\x1b[?25h" in terminal.output  # the cursor
    assert terminal.output.count("\x1b[?1049l") == 1


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}])
def test_plain_terminals_get_no_colours(
    running: Path, open_terminal: Any, environment: dict[str, str]
) -> None:
    terminal = open_terminal(running, "--once", **environment)
    assert terminal.end() == 0
    assert not re.search(r"\x1b\[3\d", terminal.output)
    assert "mean 50.0 ms" in plain(terminal.output)


def test_a_dumb_terminal_gets_one_screen(running: Path, open_terminal: Any) -> None:
    terminal = open_terminal(running, TERM="dumb")
    assert terminal.end() == 0
    assert terminal.output.count("status") == 1
    assert "\x1b" not in terminal.output


# From end to end.

TRAINS = """
import time

import torch

torch.set_num_threads(1)
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
end = time.time() + 5
while time.time() < end:
    optimizer.zero_grad()
    model(torch.ones(8, 32)).sum().backward()
    time.sleep(0.02)
    optimizer.step()
"""


def test_a_real_training_is_seen_while_it_runs_and_after(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    ours = [sys.executable, "-m", "stepscope", "run", "--out", "run", "--", sys.executable]
    with subprocess.Popen(
        [*ours, str(script)], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as job:
        during = wait_for_steps(tmp_path)
        screen = command("run", "--once", folder=tmp_path).stdout
        assert job.wait(120) == 0
    after = json.loads(command("run", "--json", folder=tmp_path).stdout)
    assert "status    training" in screen
    assert during["status"] == "training"
    assert during["ranks"][0]["steps"] <= after["ranks"][0]["steps"]
    assert (after["status"], after["exit_code"]) == ("finished", 0)
    lines = (tmp_path / "run/rank-00000/steps.jsonl").read_text().splitlines()
    assert after["ranks"][0]["steps"] == sum(json.loads(line).get("steps", 1) for line in lines)
    assert after["ranks"][0]["times"]["median_ms"] > 20


def wait_for_steps(folder: Path) -> dict[str, Any]:
    """`top --json` as soon as steps are there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if (folder / "run/rank-00000/steps.jsonl").exists():
            done = command("run", "--json", folder=folder)
            answer: dict[str, Any] = json.loads(done.stdout)
            if answer["ranks"] and answer["ranks"][0]["steps"] > 3:
                return answer
        time.sleep(0.1)
    raise AssertionError("no steps within a minute")
