"""Fixtures for every test: shared traces, a separate cache, a writer of trace files."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from browsing import browser as browser
from browsing import visit as visit
from few_variants import is_one_of
from layouts import packed, text_of
from long_tests import LONG
from shared_traces import GOLDEN, SHARED, SHARED_TRACES, VARIANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_INHERITED = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM)


def pytest_configure() -> None:
    """`nohup make test &` leaves signals ignored, and every process inherits that. A signal that
    is caught, as here, is back to its default in a process that a test starts."""
    for number in _INHERITED:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """A test that breaks off, as at a time limit, leaves no process and no open pipe behind: the
    next test would be told of them."""
    started: list[subprocess.Popen[Any]] = []
    plain = subprocess.Popen.__init__

    def begin(process: subprocess.Popen[Any], *args: Any, **options: Any) -> None:
        started.append(process)
        plain(process, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", begin)
        try:
            return (yield)
        except BaseException:
            for process in started:
                _close(process)
            raise


def _close(process: subprocess.Popen[Any]) -> None:
    if getattr(process, "returncode", 0) is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    for pipe in ("stdin", "stdout", "stderr"):
        stream = getattr(process, pipe, None)
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


settings.register_profile(
    "stepscope",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("stepscope")


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or fills the user's cache, nor uses the user's calibrations and promises."""
    folder = tmp_path / "stepscope-cache"
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(folder))
    monkeypatch.delenv("COLUMNS", raising=False)  # a test says how wide its terminal is
    monkeypatch.setenv("STEPSCOPE_PROFILES", str(tmp_path / "stepscope-profiles"))
    monkeypatch.setenv("STEPSCOPE_RECORD", str(tmp_path / "stepscope-record"))
    monkeypatch.setenv("STEPSCOPE_LIBRARY", str(tmp_path / "stepscope-library"))
    return folder


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of recordings that are too large, or not ours, to be in the repository."""
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not on this machine")
    return SHARED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `shared_trace` runs once for each shared recording. A long test may take
    `unlike_trace` instead, which leaves similar recordings to `make test-slow`."""
    if "shared_trace" not in metafunc.fixturenames:
        return
    long = "unlike_trace" in metafunc.fixturenames
    traces = [
        pytest.param(name, marks=pytest.mark.slow if long and name.endswith(VARIANTS) else ())
        for name in SHARED_TRACES
    ]
    metafunc.parametrize("shared_trace", traces, indirect=True)


@pytest.fixture
def shared_trace(shared: Path, request: pytest.FixtureRequest) -> Path:
    """One of the shared recordings."""
    path = shared / "traces" / f"{request.param}.json.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not on this machine")
    return path


@pytest.fixture
def unlike_trace(shared_trace: Path) -> Path:
    """The same for recordings that differ by more than their batch or precision."""
    return shared_trace


@pytest.fixture
def golden() -> Path:
    """The folder of our own tiny recordings."""
    return GOLDEN


@pytest.fixture
def write_trace(tmp_path: Path) -> Callable[..., Path]:
    """Write events in any layout (see layouts.py) and compression; returns the path."""
    written = 0

    def write(events: list[Any], layout: str = "kineto", **options: Any) -> Path:
        nonlocal written
        written += 1
        compression = options.pop("compression", "plain")
        path = tmp_path / f"trace-{written}.json"
        path.write_bytes(packed(text_of(events, layout, **options), compression))
        return path

    return write


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of long_tests.py, and of a test marked `few(N)` all but N variants as slow."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).as_posix() in LONG:
            item.add_marker(pytest.mark.long)
    variants: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            variants.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for found in variants.values():
        marker = found[0].get_closest_marker("few")
        assert marker is not None
        for number, item in enumerate(found):
            if not is_one_of(marker.args[0], number, len(found)):
                item.add_marker(pytest.mark.slow)
