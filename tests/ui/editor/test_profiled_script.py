"""A script profiled in a real process: its lines, its estimates, and what goes wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stepscope.errors import NotCapturedError
from stepscope.ui.editor.batch_size import batch_curve, batch_in_source
from stepscope.ui.editor.edits import follow
from stepscope.ui.editor.fake_run import end_warm_pythons
from stepscope.ui.editor.line_costs import estimate_script, line_costs_of
from stepscope.ui.editor.profile_child import profile_script

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.records.source_lines import LineCosts

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 300.0  # the machine may be busy


class Profiled:
    """A script that was copied and profiled."""

    def __init__(self, folder: Path, name: str) -> None:
        self.script = Path(shutil.copy(SCRIPTS / name, folder)).resolve()
        self.text = self.script.read_text()
        self.said: list[str] = []
        result = profile_script(
            self.script, [], limit_s=LIMIT_S, folder=folder / "run", on_progress=self.said.append
        )
        assert result.run is not None, (result.failed, result.output)
        self.run = Path(result.run)
        self.costs: LineCosts = line_costs_of(self.run)

    def line(self, text: str) -> int:
        """The number of the one line that holds this text."""
        (number,) = [n for n, line in enumerate(self.text.splitlines(), 1) if text in line]
        return number

    def by_text(self) -> dict[str, float]:
        lines = self.text.splitlines()
        return {lines[cost.line - 1].strip(): cost.total_ms for cost in self.costs.lines}


@pytest.fixture(scope="module", autouse=True)
def ended() -> Iterator[None]:
    yield
    end_warm_pythons()


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    return Profiled(tmp_path_factory.mktemp("mlp"), "mlp_loader.py")


def check_whole(costs: LineCosts) -> None:
    total = sum(cost.total_ms for cost in costs.lines) + costs.other_ms
    assert total == pytest.approx(costs.step_ms)
    assert 0 <= costs.other_ms < 0.2 * costs.step_ms
    assert sum(cost.share for cost in costs.lines) <= 1 + 1e-9


def test_costs_are_on_the_lines_that_cause_them(mlp: Profiled) -> None:
    costs = mlp.costs
    check_whole(costs)
    assert (costs.kind, costs.batch, costs.device) == ("measured", 64, "cpu")
    assert costs.verdict
    assert costs.texts[str(mlp.script)] == mlp.text
    second = costs.at(str(mlp.script), mlp.line("self.second(x)"))
    assert second is not None
    assert second == costs.lines[0]  # 1024 x 1024: the dearest by far
    assert second.forward_ms > 0
    assert second.backward_ms > second.other_ms
    assert second.calls == 1
    assert second.function == "forward"
    names = {one.name for one in second.operators}
    assert {"aten::linear", "aten::relu", "AddmmBackward0", "ReluBackward0"} <= names
    update = costs.at(str(mlp.script), mlp.line("optimizer.step()"))
    assert update is not None
    assert update.optimizer_ms > 0
    assert update.forward_ms == update.backward_ms == 0


def test_kept_bytes_are_known_to_the_byte(mlp: Profiled) -> None:
    kept = {cost.line: cost.kept_bytes for cost in mlp.costs.lines}
    assert kept[mlp.line("self.first(x)")] == 64 * 1024 * 4  # the relu's output
    assert kept[mlp.line("self.second(x)")] == 64 * 1024 * 4
    assert kept[mlp.line("optimizer.step()")] == 0


def test_an_edit_is_followed_and_the_batch_is_found(mlp: Profiled) -> None:
    edited = mlp.text.replace(
        "        out = model(x)", "        print(step)\n        out = model(x)"
    )
    followed = {one.cost.line: one for one in follow(mlp.costs, mlp.script, edited).lines}
    assert followed[mlp.line("self.second(x)")].state == "current"
    assert followed[mlp.line("loss.backward()")].state == "moved"
    assert followed[mlp.line("loss.backward()")].line == mlp.line("loss.backward()") + 1
    place = batch_in_source(mlp.text, mlp.costs)
    assert place is not None
    assert (place.line, place.value) == (mlp.line("--batch-size"), 64)
    points = {one.batch: one for one in batch_curve(mlp.run, (32, 64, 128))}
    assert points[32].step_ms < points[64].step_ms < points[128].step_ms
    assert points[64].step_ms == pytest.approx(mlp.costs.step_ms, rel=0.05)
    assert points[64].peak_bytes == mlp.costs.peak_bytes


@pytest.mark.slow
def test_an_edit_is_estimated_before_it_is_run(mlp: Profiled) -> None:
    edited = mlp.text.replace(
        "        return self.last(x)",
        "        x = x + torch.relu(self.second(x))\n        return self.last(x)",
    )
    estimate = estimate_script(
        mlp.script, {mlp.script: edited}, [], limit_s=LIMIT_S, measured=mlp.costs
    )
    check_whole(estimate)
    assert estimate.kind == "estimated"
    assert estimate.step_ms > mlp.costs.step_ms
    added = mlp.line("return self.last(x)")  # where the new line is
    new = estimate.at(str(mlp.script), added)
    second = mlp.costs.at(str(mlp.script), mlp.line("self.second(x)"))
    assert new is not None
    assert second is not None
    assert 0.5 < new.total_ms / second.total_ms < 2  # the same product, once more
    assert new.kept_bytes == 64 * 1024 * 4
    last = mlp.costs.at(str(mlp.script), added)
    moved = estimate.at(str(mlp.script), added + 1)
    assert last is not None
    assert moved is not None
    assert moved.total_ms == pytest.approx(last.total_ms)  # not edited: as measured


def test_what_cannot_be_estimated_says_why(mlp: Profiled) -> None:
    def why(text: str, measured: LineCosts | None = mlp.costs) -> str:
        with pytest.raises(NotCapturedError) as error:
            estimate_script(mlp.script, {mlp.script: text}, [], limit_s=LIMIT_S, measured=measured)
        return str(error.value)

    assert "mlp_loader.py, line 2: " in why("x = 1\ndef broken(:\n")
    assert "profile it once" in why(mlp.text, None)


def test_progress_is_told(mlp: Profiled) -> None:
    assert mlp.said[0] == "starting the script"
    assert len(mlp.said) > 1


def test_a_missing_script_and_a_run_without_lines_are_said(tmp_path: Path) -> None:
    result = profile_script(tmp_path / "no.py", [], limit_s=10, folder=tmp_path / "run")
    assert result.run is None
    assert "does not exist" in (result.failed or "")
    with pytest.raises(NotCapturedError, match="stepscope run --lines"):
        line_costs_of(tmp_path)


def test_a_script_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    result = profile_script(script, [], limit_s=2, folder=tmp_path / "run")
    assert result.run is None
    assert "was stopped after 2" in (result.failed or "")
    assert not _alive(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_profiling_ends_with_the_editor(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text(
        f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    program = (
        "from pathlib import Path; from stepscope.ui.editor.profile_child import profile_script\n"
        f"profile_script(Path({str(script)!r}), [], limit_s=600, folder=Path('run'))"
    )
    editor = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    until = time.monotonic() + 120
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.1)
    editor.kill()
    editor.wait()
    assert not _alive(int((tmp_path / "pid").read_text()))


def _alive(pid: int) -> bool:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.slow
def test_a_script_that_fails_says_how(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise ValueError('no data')\n")
    result = profile_script(script, [], limit_s=LIMIT_S, folder=tmp_path / "run")
    assert "exit code 1" in (result.failed or "")
    assert any("no data" in line for line in result.output)


def test_profiling_can_be_stopped(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import time\ntime.sleep(600)\n")
    stop = threading.Event()
    result = profile_script(
        script,
        [],
        limit_s=LIMIT_S,
        folder=tmp_path / "run",
        stop=stop,
        on_progress=lambda _: stop.set(),
    )
    assert result.failed == "profiling was stopped"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dearest", "batch"),
    [("encoder.py", "hidden = encoder(embed(tokens))", 8), ("convnet.py", "self.conv", 16)],
)
def test_other_scripts(name: str, dearest: str, batch: int, tmp_path: Path) -> None:
    profiled = Profiled(tmp_path, name)
    check_whole(profiled.costs)
    assert profiled.costs.batch == batch
    first = profiled.costs.lines[0]
    assert dearest in profiled.text.splitlines()[first.line - 1]
    estimate = estimate_script(
        profiled.script,
        {profiled.script: profiled.text},
        [],
        limit_s=LIMIT_S,
        measured=profiled.costs,
    )
    assert estimate.step_ms == pytest.approx(profiled.costs.step_ms)
    assert batch_in_source(profiled.text, profiled.costs) is not None


@pytest.mark.slow
def test_marked_steps_change_no_bit_of_the_losses(tmp_path: Path) -> None:
    losses = []
    for lines in (False, True):
        out = tmp_path / f"losses-{lines}"
        script = [sys.executable, str(SCRIPTS / "mlp_loader.py"), "--losses", str(out)]
        watch = ["--lines", "--wait", "1", "--no-explain", "--out", str(tmp_path / "run"), "--"]
        run = [sys.executable, "-m", "stepscope", "run", *watch] if lines else []
        subprocess.run([*run, *script], check=True, env=os.environ, cwd=tmp_path)
        losses.append(out.read_text())
    assert losses[0] == losses[1]
    assert (tmp_path / "run" / "rank-00000" / "trace-lines.json.gz").exists()
