"""Which line of the user's code runs: followed by Python's own tracing, and by nothing else."""

from __future__ import annotations

import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stepscope.measure import source_lines
from stepscope.measure.memory.saved_tensors import LineHistory
from stepscope.measure.profiler.schedule import Schedule
from stepscope.measure.settings import Settings
from stepscope.measure.source_lines import LineWatch, UserLine, is_user_file, write_sources

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Seen:
    """What a watch saw: one text for each mark that opened or closed."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.watch = LineWatch(self._open)

    def _open(self, line: UserLine, running: bool) -> Callable[[], None]:
        word = "in" if running else "at"
        self.events.append(f"{word} {line.line}")
        return lambda: self.events.append(f"end {line.line}")


def run(tmp_path: Path, text: str, seen: Seen) -> dict[str, Any]:
    """Run a file of the user's, which calls `begin` and `end` itself."""
    file = tmp_path / "train.py"
    file.write_text(textwrap.dedent(text))
    names: dict[str, Any] = {"begin": seen.watch.begin, "end": seen.watch.end}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names


def of(seen: Seen) -> str:
    return ", ".join(seen.events)


def test_marks_are_nested_as_calls_are(tmp_path: Path) -> None:
    seen = Seen()
    run(
        tmp_path,
        """\
        def inner():
            a = 1
            return a
        begin()
        inner()
        end()
        """,
        seen,
    )
    inner = "at 2, end 2, at 3, end 3"
    own = [event for event in seen.events if not event.endswith("line")]
    assert f"end 4, at 5, {inner}, end 5, at 6, end 6" in ", ".join(own)
    opened = sum(not event.startswith("end") for event in seen.events)
    assert opened == sum(event.startswith("end") for event in seen.events)


def test_library_code_belongs_to_the_line_that_calls_it(tmp_path: Path) -> None:
    seen = Seen()
    run(tmp_path, "import json\nbegin()\njson.dumps([1, 2])\nend()\n", seen)
    assert "at 3, end 3, at 4" in of(seen)
    assert seen.watch.files >= {str((tmp_path / "train.py").resolve())}
    assert not any("json" in file for file in seen.watch.files)


def test_exceptions_and_generators_leave_no_mark_open(tmp_path: Path) -> None:
    seen = Seen()
    run(
        tmp_path,
        """\
        def numbers():
            yield 1
            yield 2
        def fails():
            raise ValueError
        begin()
        for number in numbers():
            try:
                fails()
            except ValueError:
                pass
        end()
        """,
        seen,
    )
    depth = 0
    for event in seen.events:
        depth += -1 if event.startswith("end") else 1
        assert depth >= 0
    assert depth == 0


def test_nothing_is_traced_afterwards_and_a_debugger_comes_first(tmp_path: Path) -> None:
    seen = Seen()
    run(tmp_path, "begin()\nend()\nx = 1\n", seen)
    assert sys.gettrace() is None
    assert "3" not in {event.split()[1] for event in seen.events}
    other = Seen()

    def debugger(*_: Any) -> None:
        return None

    sys.settrace(debugger)
    try:
        other.watch.begin()
        assert sys.gettrace() is debugger
    finally:
        sys.settrace(None)
    assert other.events == []


def test_an_error_of_ours_never_reaches_the_script(tmp_path: Path) -> None:
    def broken(line: UserLine, running: bool) -> Callable[[], None]:
        if line.line == 2:
            raise RuntimeError("ours")
        return lambda: None

    seen = Seen()
    seen.watch = LineWatch(broken)
    names = run(tmp_path, "begin()\nx = 1\ny = 2\nend()\n", seen)
    assert names["y"] == 2


def test_a_loop_in_pure_python_is_not_marked_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_lines, "MOST_LINES", 50)
    seen = Seen()
    names = run(tmp_path, "begin()\nfor i in range(1000):\n    x = i\nend()\n", seen)
    assert names["x"] == 999
    assert sum(not event.startswith("end") for event in seen.events) == 50


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_not_watched(tmp_path: Path) -> None:
    seen = Seen()
    text = """\
        import os, sys
        begin()
        pid = os.fork()
        if not pid:
            os._exit(sys.gettrace() is not None)
        end()
        """
    names = run(tmp_path, text, seen)
    assert os.waitstatus_to_exitcode(os.waitpid(names["pid"], 0)[1]) == 0


def test_whose_code_a_file_is() -> None:
    assert is_user_file("/home/me/train.py")
    for name in (torch.__file__, os.__file__, source_lines.__file__, "<string>", "<frozen runpy>"):
        assert not is_user_file(name)


def test_a_watched_step_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    text = """\
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(4):
            if step == 2:
                begin()
            loss = model(torch.randn(4, 8)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item().hex())
            if step == 2:
                end()
        """
    watched = run(tmp_path, text, Seen())["losses"]
    unwatched = Seen()
    unwatched.watch.begin = lambda: None  # type: ignore[method-assign]
    assert watched == run(tmp_path, text, unwatched)["losses"]


def test_a_node_belongs_to_the_line_that_made_it(tmp_path: Path) -> None:
    history = LineHistory()
    seen = Seen()
    seen.watch = history.watch
    names = run(
        tmp_path,
        """\
        import torch
        x = torch.ones(4, requires_grad=True)
        begin()
        y = x * 2
        z = y.exp()
        end()
        """,
        seen,
    )
    lines = [history.line_of(names[name].grad_fn._sequence_nr()) for name in "yz"]
    assert [line and line.line for line in lines] == [4, 5]


def test_the_marked_steps_come_after_everything_else() -> None:
    plain = Schedule.plan(Settings(folder="", wait=1, warmup=1, active=2))
    marked = Schedule.plan(Settings(folder="", wait=1, warmup=1, active=2, lines=True))
    assert marked.windows[:-1] == plain.windows
    window = marked.windows[-1]
    assert (window.first, window.first_active, window.last) == (7, 8, 9)
    assert window.file == "trace-lines.json.gz"
    assert window.first > marked.memory_steps[-1] + 1


def test_texts_are_kept_as_they_were_when_measured(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("x = 1\n")
    write_sources(tmp_path, [str(file), str(tmp_path / "gone.py")])
    assert "x = 1" in (tmp_path / "lines.json").read_text()
    assert "gone" not in (tmp_path / "lines.json").read_text()
