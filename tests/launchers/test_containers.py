"""What a container changes: the environment, the start-up files, the disk and the user."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from trainer_jobs import HERE, captured, check_ranks, end, losses, start

pytestmark = pytest.mark.launchers
PLAIN = str(HERE.parent / "measure" / "scripts" / "plain.py")
PYTHON = sys.executable
PLAIN_STEPS = 20
as_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs root and unshare"
)


def test_a_bare_environment_needs_two_variables(tmp_path: Path) -> None:
    """As `docker run -e STEPSCOPE_CAPTURE -e PYTHONPATH`: no HOME, no PATH."""
    passed = 'STEPSCOPE_CAPTURE="$STEPSCOPE_CAPTURE" PYTHONPATH="$PYTHONPATH"'
    inside = f"exec env -i {passed} {PYTHON} {PLAIN}"
    end(start(captured(tmp_path / "run", "sh", "-c", inside), tmp_path))
    check_ranks(tmp_path / "run", 1, PLAIN_STEPS)


def test_a_replaced_python_path_is_told_and_nothing_else_changes(tmp_path: Path) -> None:
    inside = f"PYTHONPATH=/opt/app exec {PYTHON} {PLAIN}"
    bare, _ = end(start(("sh", "-c", inside), tmp_path))
    out, errors = end(start(captured(tmp_path / "run", "sh", "-c", inside), tmp_path))
    assert (losses(out), list((tmp_path / "run").glob("rank-*"))) == (losses(bare), [])
    assert "launcher resets PYTHONPATH" in errors


def test_an_isolated_python_is_named(tmp_path: Path) -> None:
    _, errors = end(start(captured(tmp_path / "run", PYTHON, "-I", PLAIN), tmp_path))
    assert "-I` ignores PYTHONPATH" in errors


def test_start_up_files_of_the_image_still_run(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("sitecustomize", "usercustomize"):
        (own / f"{name}.py").write_text(f"import sys; sys.stdout.write('{name} ran\\n')")
    variables = {"PYTHONPATH": str(own)}
    bare, _ = end(start((PYTHON, PLAIN), tmp_path, variables))
    out, _ = end(start(captured(tmp_path / "run", PYTHON, PLAIN), tmp_path, variables))
    assert out.startswith("sitecustomize ran\n")
    # `stepscope run` is a Python, too.
    assert sorted(out.splitlines()) == sorted([*bare.splitlines(), *_start_up_lines(bare)])
    check_ranks(tmp_path / "run", 1, PLAIN_STEPS)


def _start_up_lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.endswith(" ran")]


@as_root
def test_a_read_only_root_needs_a_writable_run_folder_only(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    command = " ".join(captured(out, PYTHON, PLAIN))
    read_only = f"mount --bind {out} {out} && mount -o remount,bind,ro / && ! touch {tmp_path}/x"
    inside = f"{read_only} && exec {command}"
    # torch itself wants a folder for temporary files.
    end(start(("unshare", "--mount", "sh", "-c", inside), tmp_path, {"TMPDIR": "/dev/shm"}))
    check_ranks(out, 1, PLAIN_STEPS)


@as_root
def test_a_user_who_may_not_write_trains_all_the_same(tmp_path: Path) -> None:
    """Without the right to write where others may not, as another user in a container."""
    inside = f"exec setpriv --bounding-set=-all --inh-caps=-all {PYTHON} {PLAIN}"
    closed = "chmod 555 . hosts; " + inside
    bare, _ = end(start(("sh", "-c", inside), tmp_path))
    out = tmp_path / "run"
    command = captured(out, "sh", "-c", f"cd {out} && {closed}")
    output, errors = end(start(command, tmp_path))
    assert losses(output) == losses(bare)
    assert list(out.glob("rank-*")) == []
    assert "nothing was captured" in errors
