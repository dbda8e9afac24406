"""Whatever keeps the run folder from being made, the command runs; nested and concurrent runs."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outages import Job, bare_losses, check_folder, check_nothing_else, losses, training

ENDS_WITH_7 = "import sys; print('it ran'); sys.exit(7)"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can change users and disks")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path, ENDS_WITH_7)


def check_ran(done: subprocess.CompletedProcess[str], reason: str) -> None:
    assert (done.stdout, done.returncode) == ("it ran\n", 7), done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("stepscope: nothing is captured; the command runs without stepscope: ")
    assert reason in line


def without_out(job: Job) -> list[str]:
    command = job.captured()
    return [word for word in command if word not in ("--out", str(job.out))]


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("train.py", "file exists"),
        ("train.py/run", "not a directory"),
        ("x" * 300, "file name too long"),
        ("/proc/run", "no such file or directory"),
    ],
    ids=["a-file", "below-a-file", "too-long", "no-such-disk"],
)
def test_a_folder_that_cannot_be_made_is_said_and_the_command_runs(
    job: Job, out: str, reason: str
) -> None:
    check_ran(job.call(job.captured(out=job.place / out)), reason)
    check_nothing_else(job)


def test_a_file_called_like_our_folder_is_in_the_way(job: Job) -> None:
    (job.place / "stepscope-runs").touch()
    check_ran(job.call(without_out(job)), "not a directory")


def test_a_working_folder_that_is_gone(job: Job) -> None:
    gone = job.place / "gone"
    away = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {{}}"
    command = away.format(shlex.join(without_out(job)))
    check_ran(job.call(["bash", "-c", command]), "no such file or directory")
    named = away.format(shlex.join(job.captured()))
    done = job.call(["bash", "-c", named])
    assert (done.stdout, done.returncode) == ("it ran\n", 7)
    assert json.loads((job.out / "run.json").read_text())["folder"] is None


@needs_root
def test_a_disk_that_is_only_read(job: Job) -> None:
    disk = job.place / "home"
    command = f"mount -t tmpfs -o ro small {disk} || exit 99; {shlex.join(job.captured(out=disk))}"
    done = job.call(["unshare", "-m", "bash", "-c", command])
    if done.returncode == 99:
        pytest.skip("no disk can be mounted here")
    check_ran(done, "read-only file system")


@needs_root
def test_nobody_without_a_home(job: Job) -> None:
    """No right to write, no HOME and no such user."""
    job.temporary.chmod(0o755)
    script = job.temporary / "train.py"
    script.write_text(ENDS_WITH_7)
    ours = [sys.executable, "-m", "stepscope", "run", "--", sys.executable, str(script)]
    environment = {name: value for name, value in job.environment.items() if name != "HOME"}
    try:
        done = job.call(ours, env=environment, cwd=job.temporary, user=54321)
    except PermissionError:
        pytest.skip("this Python can be run by its owner only")
    check_ran(done, "permission denied")


WITHOUT_FORK = """
import errno, subprocess, sys
def refused(*_, **__):
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
subprocess.Popen = refused
from stepscope.ui.cli.verbs import main
main()
"""


def test_no_second_process_means_the_command_takes_our_place(job: Job) -> None:
    words = job.captured()
    done = job.call([sys.executable, "-c", WITHOUT_FORK, *words[words.index("run") :]])
    assert (done.stdout, done.returncode) == ("it ran\n", 7), done.stderr
    assert "the command takes its place" in done.stderr
    assert "command replaced it" in check_folder(job.out)
    check_nothing_else(job)


def test_an_environment_without_room_for_our_settings(job: Job) -> None:
    for spare in (0, 1000, 2000):
        full = dict(job.environment)
        used = sum(len(name) + len(value) + 10 for name, value in full.items())
        limit = resource.getrlimit(resource.RLIMIT_STACK)[0] // 4
        number = 0
        while used + 131_000 < min(limit, 6 << 20) - 4000 - spare:
            full[f"FILL{number}"] = "x" * 130_900
            used, number = used + 131_000, number + 1
        done = job.call(job.captured(), env=full)
        assert (done.stdout, done.returncode) == ("it ran\n", 7), done.stderr[-300:]
        for file in sorted(job.out.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()


@pytest.mark.parametrize("closed", ["2>/dev/full", ">&-", "2>&-", "<&-", "2>&1 | true"])
def test_nobody_to_talk_to_changes_no_exit_code(job: Job, closed: str) -> None:
    job.script.write_text("raise SystemExit(7)")
    command = f"{shlex.join(job.captured())} {closed}; exit ${{PIPESTATUS[0]}}"
    assert job.call(["bash", "-c", command]).returncode == 7


def test_missing_temporary_folder_is_no_matter(job: Job) -> None:
    environment = {**job.environment, "TMPDIR": str(job.place / "no-such-folder")}
    done = job.call(job.captured(), env=environment)
    assert (done.stdout, done.returncode) == ("it ran\n", 7)


def test_a_command_that_cannot_start_leaves_no_folder(job: Job) -> None:
    done = job.call([*job.captured()[:-2], "no-such-command"])
    assert done.returncode == 2
    assert "no such command" in done.stderr
    assert not job.out.exists()


def test_of_ten_runs_into_one_folder_one_is_made_and_nine_are_refused(job: Job) -> None:
    command = job.captured()
    runs = [job.start(command) for _ in range(10)]
    ended = [(run.communicate(timeout=120), run.returncode) for run in runs]
    assert sorted(code for _, code in ended) == [2] * 9 + [7]
    for (output, complaints), code in ended:
        if code == 2:
            assert output == ""
            assert "is not empty: a run folder is never overwritten" in complaints
    check_nothing_else(job)
    check_folder(job.out)


def test_ten_runs_at_the_same_second_get_a_folder_each(job: Job) -> None:
    runs = [job.start(without_out(job)) for _ in range(10)]
    ended = [(run.communicate(timeout=120)[0], run.returncode) for run in runs]
    assert ended == [("it ran\n", 7)] * 10
    records = [*(job.place / "stepscope-runs").glob("*/run.json")]
    assert len(records) == 10
    statuses: list[Any] = [json.loads(file.read_text())["status"] for file in records]
    assert statuses == ["finished"] * 10


def test_a_run_inside_a_run_captures_once_and_both_folders_are_closed(tmp_path: Path) -> None:
    job = Job(tmp_path, training())
    outer = job.captured()
    inner = job.captured(out=job.place / "run" / "inner")
    done = job.call([*outer[: outer.index("--") + 1], *inner])
    assert (losses(done.stdout), done.returncode) == (bare_losses(), 0), done.stderr
    check_nothing_else(job)
    check_folder(job.out)
    check_folder(job.out / "inner")
    (rank,) = json.loads((job.out / "inner" / "run.json").read_text())["ranks"]
    assert (rank["steps"], rank["missing"]) == (16, {})


def test_a_run_inside_a_run_with_its_folder_is_refused(job: Job) -> None:
    command = job.captured()
    done = job.call([*command[: command.index("--") + 1], *command])
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    check_folder(job.out)
    check_nothing_else(job)


@pytest.mark.slow
def test_a_job_that_starts_a_captured_job_keeps_its_own_capture(tmp_path: Path) -> None:
    inner = Job(tmp_path / "inner", training())
    starts = f"""
        if step == 8:
            import subprocess
            done = subprocess.run({inner.captured()!r}, capture_output=True, text=True)
            print(done.returncode, done.stdout.splitlines()[-1][:0], flush=True)
    """
    job = Job(tmp_path, training(inside=starts))
    done = job.call(job.captured())
    assert (losses(done.stdout), done.returncode) == (bare_losses(), 0), done.stderr
    for out in (job.out, inner.out):
        check_folder(out)
        (rank,) = json.loads((out / "run.json").read_text())["ranks"]
        assert rank["steps"] == 16
    check_nothing_else(job)
