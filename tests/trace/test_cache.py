"""A cached trace is the trace, or is not used at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made import call, kernel, memory, op, ops
from msgspec.structs import replace

from stepscope import read_trace
from stepscope.records.trace import Trace
from stepscope.trace import cache as cache_module
from stepscope.trace import read as read_module
from stepscope.trace.cache import Cache


@pytest.fixture(autouse=True)
def cache_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "_CACHE_FROM_BYTES", 0)


@pytest.fixture
def path(write_trace: Any) -> Path:
    group = {"Collective name": "allreduce", "Group size": 8}
    events = [
        *ops(300),
        op("é \N{SNOWMAN}", "31", 5),
        call("cudaLaunchKernel", 1, 2, 5),
        kernel("nccl", 5, 5, 5, **group),
        memory(3, 512),
    ]
    return write_trace(events)


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.columns"))


def assert_same(one: Trace, other: Trace) -> None:
    for field in Trace.__struct_fields__:
        mine, theirs = getattr(one, field), getattr(other, field)
        if field not in ("host", "device", "memory"):
            assert mine == theirs, field
            continue
        for column in type(mine).__struct_fields__:
            a, b = getattr(mine, column), getattr(theirs, column)
            assert a.dtype == b.dtype, column
            assert np.array_equal(a, b), column


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that were really read, in order."""
    seen: list[Path] = []
    really = read_module._read

    def spy(path: Path, *rest: Any) -> Trace:
        seen.append(path)
        return really(path, *rest)

    monkeypatch.setattr(read_module, "_read", spy)
    return seen


def test_second_open_equals_the_first_column_by_column(path: Path, reads: list[Path]) -> None:
    first = read_trace(path)
    second = read_trace(path)
    assert reads == [path]
    assert first.quality
    assert_same(first, second)


def test_real_traces_come_back_from_the_cache_unchanged(golden: Path, reads: list[Path]) -> None:
    for name in ("cpu_step", "cpu_stack_memory", "cuda_step", "cuda_graph"):
        file = golden / f"{name}.json.gz"
        assert_same(read_trace(file), read_trace(file))
    assert len(reads) == 4


def test_an_entry_is_found_again_wherever_the_file_moves(path: Path, reads: list[Path]) -> None:
    first = read_trace(path)
    moved = path.rename(path.with_name("elsewhere.json"))
    assert_same(replace(first, path=str(moved)), read_trace(moved))
    assert len(reads) == 1


def test_a_file_rewritten_with_the_same_size_and_time_is_read_again(path: Path) -> None:
    read_trace(path)
    stat = path.stat()
    path.write_bytes(path.read_bytes().replace(b"aten::op3", b"aten::xx3"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert "aten::xx3" in read_trace(path).strings


def test_any_cut_or_flipped_byte_of_an_entry_means_not_cached(
    path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    fresh = read_trace(path)
    [entry] = entries(cache_dir)
    whole = entry.read_bytes()
    rng = np.random.default_rng(1)
    places = [0, 5, 20, 30, *rng.integers(0, len(whole), 60).tolist()]
    damaged = [whole[:at] for at in places]
    damaged += [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in places]
    for content in damaged:
        entry.write_bytes(content)
        assert_same(fresh, read_trace(path))


def test_an_entry_of_another_version_is_not_used(
    path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace(path)
    monkeypatch.setattr(cache_module, "VERSION", cache_module.VERSION + 1)
    read_trace(path)
    assert len(reads) == 2


def test_two_processes_may_write_the_same_entry_at_once(path: Path, cache_dir: Path) -> None:
    program = (
        "import sys; from stepscope.trace import read as r; r._CACHE_FROM_BYTES = 0; "
        "print(r.read_trace(sys.argv[1]).events)"
    )
    source = str(Path(read_module.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": source}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for _ in range(3)
    ]
    results = [process.communicate(timeout=60) for process in running]
    expected = str(read_trace(path, cache=False).events).encode()
    assert [(out.strip(), err) for out, err in results] == [(expected, b"")] * 3
    assert len(entries(cache_dir)) == 1
    assert list(cache_dir.glob("*.tmp")) == []


def test_a_folder_that_cannot_be_written_costs_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file" / "cache", Path("/proc/no-such-folder")):
        monkeypatch.setenv("STEPSCOPE_CACHE_DIR", str(folder))
        assert read_trace(path).events == 304


def test_a_disk_that_fills_up_leaves_nothing_behind(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, trace: Trace) -> None:
        file.write(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache_module, "_write", full)
    assert read_trace(path).events == 304
    assert list(cache_dir.iterdir()) == []


def test_an_entry_in_a_folder_that_others_own_is_still_used(
    path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_trace(path)

    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cache_module.os, "utime", refuse)
    read_trace(path)
    assert len(reads) == 1


def test_the_least_recently_used_entries_go_first(
    write_trace: Any, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_trace(ops(100 + i)) for i in range(4)]
    for age, path in enumerate(paths[:3]):
        read_trace(path)
        for entry in entries(cache_dir):
            os.utime(entry, ns=(0, entry.stat().st_mtime_ns - 10**9 * (3 - age)))
    read_trace(paths[0])  # used again: now the newest
    size = max(entry.stat().st_size for entry in entries(cache_dir))
    monkeypatch.setattr(cache_module, "LIMIT_BYTES", 3 * size)
    read_trace(paths[3])
    kept = {entry.stem for entry in entries(cache_dir)}
    store = Cache.default()
    assert kept == {store.key(path) for path in (paths[0], paths[2], paths[3])}


def test_what_a_killed_process_left_is_swept_up_after_a_day(path: Path, cache_dir: Path) -> None:
    cache_dir.mkdir()
    old, new = cache_dir / "old.tmp", cache_dir / "new.tmp"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (0, time.time() - 2 * 24 * 3600))
    read_trace(path)
    assert not old.exists()
    assert new.exists()


def test_a_file_that_changes_while_it_is_read_is_not_cached(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = read_module._read

    def grow(path: Path, *rest: Any) -> Trace:
        trace = really(path, *rest)
        with path.open("ab") as file:
            file.write(b" ")
        return trace

    monkeypatch.setattr(read_module, "_read", grow)
    read_trace(path)
    assert entries(cache_dir) == []


def test_without_the_cache_nothing_is_read_from_it_or_written(
    path: Path, cache_dir: Path, reads: list[Path]
) -> None:
    read_trace(path, cache=False)
    read_trace(path, cache=False)
    assert len(reads) == 2
    assert not cache_dir.exists()


def test_small_files_are_not_worth_an_entry(
    path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_module, "_CACHE_FROM_BYTES", 1 << 20)
    read_trace(path)
    assert not cache_dir.exists()


def test_facts_that_no_entry_can_hold_only_mean_not_cached(write_trace: Any) -> None:
    head = {"big": 10**30, "distributedInfo": {"pg_config": [{"ranks": 2**80}]}}
    path = write_trace(ops(3), head=head)
    assert_same(read_trace(path), read_trace(path))


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE_DIR", "/somewhere")
    assert Cache.default().folder == Path("/somewhere")
    monkeypatch.delenv("STEPSCOPE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert Cache.default().folder == Path("/xdg/stepscope")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert Cache.default().folder == Path("/home/someone/.cache/stepscope")


def test_a_user_without_a_home_gets_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEPSCOPE_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert Cache.default().folder.name == "stepscope"
