"""The tests pass however they are started: in the foreground, or by `nohup make test &`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parent / "conftest.py"
CHILD = "import signal; print([signal.getsignal(n).name for n in (1, 3)], signal.getsignal(2))"


def test_what_a_test_starts_has_default_signals_even_where_the_shell_ignores_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_inner.py").write_text(
        "import subprocess, sys\n"
        "def test_inner():\n"
        f"    said = subprocess.run([sys.executable, '-c', {CHILD!r}], capture_output=True)\n"
        "    assert said.stdout.startswith(b\"['SIG_DFL', 'SIG_DFL'] <built-in\"), said.stdout\n"
    )
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(CONFTEST.parent)!r})\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        f"spec = spec_from_file_location('outer', {str(CONFTEST)!r})\n"
        "outer = module_from_spec(spec); spec.loader.exec_module(outer)\n"
        "pytest_configure = outer.pytest_configure\n"
    )

    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path, preexec_fn=ignore, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
