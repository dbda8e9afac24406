"""What was attached, and why nothing was: from run folders as capture leaves them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from stepscope.measure.settings import Settings
from stepscope.records.folders import processes_file, this_host
from stepscope.ui.jobs.run_folder import (
    Attachment,
    isolating_option,
    steps_seen,
    why_no_trace,
    why_nothing,
)
from verb_process import run_verb

COMMAND = ("python", "train.py")


def settings(folder: Path, wait: int | None = None) -> Settings:
    return Settings(folder=str(folder), wait=wait)


def told(folder: Path, *events: str) -> Path:
    lines = [json.dumps({"event": event, "pid": 7, "unix": 0.0}) for event in events]
    file = processes_file(folder, this_host())
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))
    return folder


def why(folder: Path, code: int, *events: str, command: tuple[str, ...] = COMMAND) -> str:
    return why_nothing(told(folder, *events), settings(folder), command, code)


def test_a_crash_before_training_is_called_a_crash(tmp_path: Path) -> None:
    assert "failed (exit code 1) before it imported torch" in why(tmp_path, 1, "started")
    assert "failed (exit code 3) after it imported torch" in why(tmp_path, 3, "started", "torch")
    found = why(tmp_path, 1, "started", "torch", "backward")
    assert "failed (exit code 1) before a training step ended" in found


def test_a_process_that_we_never_got_into_is_named_with_its_remedy(tmp_path: Path) -> None:
    found = why(tmp_path, 0)
    assert "stepscope did not get into any Python process" in found
    assert "-m stepscope run" in found
    assert "stepscope.watch()" in found
    assert "PYTHONPATH" in why(tmp_path, 0, "started")


def test_a_ray_cluster_that_was_there_is_a_possible_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    for events in (["started"], ["started", "torch"]):
        assert "use stepscope.ray.capture()" in why(tmp_path, 0, *events)
        assert "Ray" not in why(tmp_path, 1, *events)


def test_mpirun_is_told_to_take_the_environment_along(tmp_path: Path) -> None:
    found = why(tmp_path, 0, command=("/usr/bin/mpirun", "-np", "2", "python", "train.py"))
    assert "mpirun -x STEPSCOPE_CAPTURE -x PYTHONPATH" in found
    assert "mpirun ... stepscope run -- python train.py" in found


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-sE"])
def test_an_option_that_keeps_us_out_is_named(tmp_path: Path, option: str) -> None:
    found = why(tmp_path, 0, command=("/usr/bin/python3.11", option, "train.py"))
    assert f"`python3.11 {option}` ignores PYTHONPATH" in found


def test_options_of_the_script_are_not_pythons() -> None:
    assert isolating_option(("python", "train.py", "-I")) is None
    assert isolating_option(("python", "-m", "train", "-E")) is None
    assert isolating_option(("torchrun", "--nproc-per-node=2", "train.py")) is None


def test_a_training_in_forked_processes_is_named_and_told_what_to_do(tmp_path: Path) -> None:
    """Of a parent that has trained itself: others are captured."""
    found = why(tmp_path, 0, "started", "torch", "backward", "forked")
    assert "the script forked its training processes" in found
    assert 'get_context("spawn")' in found


def test_backward_passes_without_a_step_name_the_flags(tmp_path: Path) -> None:
    assert "--step-on" in why(tmp_path, 0, "started", "torch", "backward")


def test_no_trace_of_a_short_script_says_how_short_it_was(tmp_path: Path) -> None:
    facts = {"status": "finished", "problems": [], "steps": 1}
    assert why_no_trace(facts, settings(tmp_path)) == (
        "only 1 step was seen; a trace needs at least 3"
    )
    facts["steps"] = 9
    assert "9 steps were seen" in why_no_trace(facts, settings(tmp_path, wait=20))


def steps(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": step}) for step in range(number)]
    (folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines) + '{"step": 9')


def test_steps_are_counted_from_the_end_of_the_list(tmp_path: Path) -> None:
    assert steps_seen(tmp_path / "none") == 0
    steps(tmp_path / "rank-00000", 1234)
    assert steps_seen(tmp_path / "rank-00000") == 1234


def test_what_was_attached_is_said_once(tmp_path: Path) -> None:
    told(tmp_path, "started", "torch", "backward", "step")
    steps(tmp_path / "rank-00000", 12)
    attachment = Attachment(tmp_path, settings(tmp_path, wait=13), COMMAND)
    attachment.news()
    attachment._stepped = time.monotonic() - 60
    assert attachment.news() == "attached to 1 process: 12 steps seen, window at steps 15 to 17"
    assert attachment.done


def test_passes_that_end_no_step_are_said_while_the_command_runs(tmp_path: Path) -> None:
    told(tmp_path, "started", "torch", "backward")
    attachment = Attachment(tmp_path, settings(tmp_path), COMMAND)
    assert attachment.news() is None
    attachment._passed = time.monotonic() - 60
    assert "--step-on" in (attachment.news() or "")
    assert attachment.news() is None  # once is enough


def run(tmp_path: Path, *options: str, seconds: float = 4.0) -> str:
    """What stepscope says of a training that takes so long."""
    script = tmp_path / "train.py"
    script.write_text(
        "import time, torch\n"
        "weight = torch.ones(3, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
        "for _ in range(10):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        f"    time.sleep({seconds} / 10)\n"
    )
    ours = ["--no-explain", "--out", tmp_path / "run", *options]
    done = run_verb("run", *ours, "--", script)
    assert done.returncode == 0
    return done.stderr


def test_within_seconds_of_the_first_step_it_says_what_was_attached(tmp_path: Path) -> None:
    assert "attached to 1 process: " in run(tmp_path)


@pytest.mark.slow
def test_quiet_says_nothing_while_the_command_runs(tmp_path: Path) -> None:
    assert "attached" not in run(tmp_path, "--quiet")
