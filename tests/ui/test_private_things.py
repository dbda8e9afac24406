"""What other users of the machine and other threads of the process do not get to see."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stepscope.ui.cli.serve import command as serve
from stepscope.ui.html.render import write_atomically

TOKEN = "a-token-of-twenty-letters"


def test_the_token_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette")
    launched: list[Path] = []

    def begin_only(_app: object, listener: socket.socket, on_start: Callable[[], None]) -> None:
        on_start()
        listener.close()

    def launch(target: str) -> int:
        launched.append(Path(target))
        assert TOKEN not in target
        assert f"token={TOKEN}" in Path(target).read_text()
        assert stat.S_IMODE(Path(target).stat().st_mode) == 0o600
        return 0

    monkeypatch.setattr(click, "launch", launch)
    monkeypatch.setattr("stepscope.ui.serve.app.serve_until_stopped", begin_only)
    monkeypatch.setenv("STEPSCOPE_SERVE_TOKEN", TOKEN)
    done = CliRunner().invoke(serve, [str(tmp_path), "--open", "--port", "0"])
    assert done.exit_code == 0, done.output
    assert len(launched) == 1
    assert not launched[0].exists()


def test_a_report_is_written_without_touching_the_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as changed:
            changed.setattr(os, "umask", lambda _mask: pytest.fail("of the whole process"))
            write_atomically(tmp_path / "report.html", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("verb", "collects"), [("explain", False), ("sweep", True), ("tune", True), ("run", True)]
)
def test_garbage_is_collected_in_verbs_that_train_or_live_long(verb: str, collects: bool) -> None:
    program = (
        "import gc, sys; from stepscope.ui.cli.verbs import cli; "
        f"cli.get_command(None, {verb!r}); print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == str(collects), done.stderr
