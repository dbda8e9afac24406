"""What DeepSpeed's launcher takes to other hosts, and how the settings get into that."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.measure.settings import VARIABLE, Settings
from stepscope.ui.jobs.environment import deepspeed_variables, job_environment, starts_deepspeed

# DeepSpeed puts quotes around values with other characters, and a shell then removes ours.
UNQUOTED = re.compile(r"[\w@%+=:,./-]+")


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("deepspeed --hostfile hosts train.py", True),
        ("/opt/bin/deepspeed train.py", True),
        ("python -m deepspeed.launcher.runner train.py", True),
        ("deepspeed --no_ssh --node_rank 0 train.py", False),
        ("python train.py deepspeed", False),
        ("accelerate launch --use_deepspeed train.py", False),
        ("torchrun train.py --deepspeed", False),
    ],
)
def test_deepspeeds_launcher_is_recognised(command: str, expected: bool) -> None:
    assert starts_deepspeed(command.split()) is expected


def test_the_file_has_the_users_lines_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here, run = tmp_path / "home", tmp_path / "here", tmp_path / "run"
    for folder in (home, here, run):
        folder.mkdir()
    (home / ".deepspeed_env").write_text("A=1\nB=2")
    (here / ".deepspeed_env").write_text("B=3\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    settings = Settings(folder=str(run), active=5)
    variables = deepspeed_variables(settings, {"TORCH_FR_BUFFER_SIZE": "2000"})
    file = Path(variables.pop("DS_ENV_FILE"))
    assert not variables
    assert not list(run.iterdir())  # run folders are shared, and the lines may hold keys
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    *users, ours, recorder = file.read_text().splitlines()
    assert users == ["A=1", "B=2", "B=3"]
    assert recorder == "TORCH_FR_BUFFER_SIZE=2000"
    name, _, value = ours.partition("=")
    assert name == VARIABLE
    assert UNQUOTED.fullmatch(value)
    monkeypatch.setenv(VARIABLE, value)
    assert Settings.from_environment() == settings


def test_a_file_that_the_user_names_is_read_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").write_text("A=1\n")
    (tmp_path / ".deepspeed_env").write_text("B=2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ENV_FILE", str(tmp_path / "mine"))
    environment = job_environment(Settings(folder=str(tmp_path)), ("deepspeed", "train.py"))
    content = Path(environment["DS_ENV_FILE"]).read_text()
    assert content.startswith(f"A=1\n{VARIABLE}=")
    assert (tmp_path / "mine").read_text() == "A=1\n"


def test_the_file_ends_with_our_process(tmp_path: Path) -> None:
    program = (
        "from stepscope.measure.settings import Settings\n"
        "from stepscope.ui.jobs.environment import deepspeed_variables\n"
        "print(deepspeed_variables(Settings(folder='x'), {})['DS_ENV_FILE'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.strip()
    assert not Path(done.stdout.strip()).exists()


def test_other_commands_and_a_disk_that_refuses_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(folder=str(tmp_path))
    assert "DS_ENV_FILE" not in job_environment(settings, ("torchrun", "train.py"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    assert "DS_ENV_FILE" not in job_environment(settings, ("deepspeed", "train.py"))
