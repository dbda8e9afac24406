"""The table of kills: each signal, to `run` itself or its group, at each moment of a job's life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from outages import (
    Job,
    bare_losses,
    check_folder,
    check_nothing_else,
    losses,
    shell_code,
    training,
)

SLOW_PACKING = """
import gzip
opened = gzip.open
def slowly(*args, **kwargs):
    here("packing")
    return opened(*args, **kwargs)
gzip.open = slowly
"""
AT_EXIT = "import atexit; atexit.register(here, 'exit')"
MOMENTS = {
    "import": training(before="here('import')"),
    "first-step": training(inside="if step == 0: here('first-step')"),
    "window": training(inside="if step == 5: here('window')"),
    "packing": training(before=SLOW_PACKING, inside="if step == 7: time.sleep(30 if GO else 0)"),
    "after": training(inside="if step == 12: here('after')"),
    "exit": training(before=AT_EXIT),
}
SIGNALS = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT", "SIGQUIT", "SIGKILL")
# One moment of each signal, and one signal of each moment; `make test-slow` does the rest.
QUICK = {
    ("SIGHUP", "window"),
    ("SIGUSR1", "import"),
    ("SIGINT", "after"),
    ("SIGQUIT", "first-step"),
    ("SIGKILL", "after"),
    ("SIGTERM", "exit"),
}
TABLE = [
    pytest.param(name, moment, marks=() if (name, moment) in QUICK else pytest.mark.slow)
    for name in SIGNALS
    for moment in MOMENTS
]


@cache
def bare_code(name: str) -> int:
    """How Python itself ends by the signal."""
    waits = "import time; print('at work', flush=True); time.sleep(30)"
    with subprocess.Popen(
        [sys.executable, "-c", waits], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.Signals[name])
        return shell_code(process.wait())


def until(process: subprocess.Popen[str], moment: str) -> list[str]:
    """Everything printed until then."""
    assert process.stdout is not None
    lines = []
    while line := process.stdout.readline():
        lines.append(line)
        if line.strip() == f"at {moment}":
            break
    return lines


@pytest.fixture(autouse=True)
def no_core_files() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "moment"), TABLE)
def test_a_killed_run_ends_as_the_bare_command_and_says_so(
    tmp_path: Path, name: str, moment: str
) -> None:
    job = Job(tmp_path, MOMENTS[moment])
    process = job.start(job.captured())
    lines = until(process, moment)
    time.sleep(0.1)
    process.send_signal(signal.Signals[name])
    if name == "SIGKILL":
        code = process.wait(timeout=60)
        said = check_folder_of_killed(job)
        job.go.touch()  # whoever kills us does not kill the job
    elif moment == "packing":
        job.go.touch()
    output, complaints = process.communicate(timeout=60)
    found = losses("".join(lines) + output)
    if name == "SIGKILL":
        assert code == -signal.SIGKILL
        assert found == bare_losses()
        assert "not closed: stepscope run" in said
    else:
        # Python ignores an interrupt inside an exit handler, and so ends with 0.
        ignored = (name, moment) == ("SIGINT", "exit")
        assert process.returncode == (0 if ignored else bare_code(name)), complaints
        assert found == bare_losses()[: len(found)]
        assert f'"{name}"' in (job.out / "run.json").read_text()
        assert '"status": "finished"' in (job.out / "run.json").read_text()
    check_nothing_else(job)
    check_folder(job.out)
    assert "Traceback" not in complaints or name == "SIGINT"


def check_folder_of_killed(job: Job) -> str:
    """Read while the job still runs: what it is writing is there."""
    import stepscope
    from stepscope.errors import StepscopeError

    try:
        found = stepscope.explain_job(job.out, cache=False)
    except StepscopeError as error:
        return str(error)
    return "; ".join(note.detail for note in found.quality)


@pytest.mark.parametrize(
    "name", [n if n in ("SIGTERM", "SIGINT") else pytest.param(n, marks=pytest.mark.slow)
             for n in SIGNALS]
)  # fmt: skip
@pytest.mark.parametrize("begun", [False, True], ids=["at-once", "before-exec"])
def test_a_signal_before_the_command_starts_ends_run(
    tmp_path: Path, name: str, begun: bool
) -> None:
    job = Job(tmp_path, training())
    process = job.start(job.captured())
    while begun and not (job.out / "run.json").exists():
        time.sleep(0.001)
    process.send_signal(signal.Signals[name])
    output, _ = process.communicate(timeout=60)
    code = shell_code(process.returncode)
    found = losses(output)
    # Python that is interrupted while it starts ends with 1.
    assert code in ((130, 1) if name == "SIGINT" else (bare_code(name),))
    assert found == bare_losses()[: len(found)]
    check_nothing_else(job)
    if job.out.exists():
        check_folder(job.out)


COUNTS = """
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda number, frame: heard.append(number))
"""
TELLS = "print(sorted(heard), flush=True); sys.exit(9)"


@pytest.mark.parametrize(
    "to_group", [pytest.param(False, marks=pytest.mark.slow), True], ids=["to-run", "to-group"]
)
def test_the_scripts_own_handlers_hear_every_signal_once(tmp_path: Path, to_group: bool) -> None:
    job = Job(tmp_path, training(before=COUNTS, inside="if step == 8: here('work')", after=TELLS))
    results = []
    for command in (job.bare(), job.captured()):
        job.go.unlink(missing_ok=True)
        process = job.start(command)
        lines = until(process, "work")
        for name in ("SIGTERM", "SIGUSR1", "SIGUSR1", "SIGHUP", "SIGINT"):
            number = signal.Signals[name]
            os.killpg(process.pid, number) if to_group else process.send_signal(number)
            time.sleep(0.4)
        job.go.touch()
        output, complaints = process.communicate(timeout=60)
        results.append(("".join(lines) + output, process.returncode))
        assert "Traceback" not in complaints
    assert results[0] == results[1]
    assert results[1][1] == 9
    check_nothing_else(job)
    check_folder(job.out)


def test_a_signal_twice_is_heard_twice_and_the_second_may_end_it(tmp_path: Path) -> None:
    once = "signal.signal(signal.SIGTERM, lambda n, f: signal.signal(n, signal.SIG_DFL))"
    job = Job(tmp_path, training(before=once, inside="if step == 8: here('work')"))
    process = job.start(job.captured())
    lines = until(process, "work")
    process.send_signal(signal.SIGTERM)
    time.sleep(0.4)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert losses("".join(lines) + output) == bare_losses()[:9]
    check_nothing_else(job)
    assert "SIGTERM" in check_folder(job.out)


def test_an_ignored_hangup_stays_ignored(tmp_path: Path) -> None:
    job = Job(tmp_path, training(inside="if step == 8: here('work')"))
    process = job.start(["nohup", *job.captured()])
    until(process, "work")
    process.send_signal(signal.SIGHUP)
    time.sleep(0.3)
    job.go.touch()
    process.communicate(timeout=60)
    assert process.returncode == 0
    check_nothing_else(job)


def test_a_kill_of_everybody_is_told_from_a_run_that_goes_on(tmp_path: Path) -> None:
    job = Job(tmp_path, training(inside="if step == 12: here('work')"))
    process = job.start(job.captured())
    until(process, "work")
    time.sleep(1.0)
    assert "is still running" in check_folder_of_killed(job)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    check_nothing_else(job)
    said = check_folder(job.out)
    assert "was killed (SIGKILL" in said
    assert "ended without closing" in said


def test_a_job_whose_exit_codes_nobody_should_keep_gives_its_own(tmp_path: Path) -> None:
    """Some daemons ignore SIGCHLD, and their children inherit that."""
    job = Job(tmp_path, "import sys; sys.exit(11)")
    ignored = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    command = [sys.executable, "-c", f"{ignored}; os.execv(sys.argv[1], sys.argv[1:])"]
    assert job.call([*command, *job.captured()]).returncode == 11
