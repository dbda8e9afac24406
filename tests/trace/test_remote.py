"""Traces behind URLs: found, read with what lies beside them, and named by their URL in errors."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stepscope import UnreadableInputError, UsageError, explain_job, read_trace
from stepscope.explain.engines import Here
from stepscope.explain.explain_job import JobTraces
from stepscope.trace.discover import find_traces, size_bytes
from stepscope.trace.remote import fetch, is_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Put = Callable[..., str]

fsspec = pytest.importorskip("fsspec")

EVENT = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 9}
STEPS = [{"step": n, "wall_ns": 5_000_000, "device_ns": 4_000_000} for n in range(4)]


def text_of(rank: int) -> bytes:
    info = {"rank": rank, "world_size": 2}
    return json.dumps({"distributedInfo": info, "traceEvents": [EVENT]}).encode()


@pytest.fixture
def put() -> Iterator[Put]:
    """Writes a file of the filesystem that lives in memory; all are gone afterwards."""
    filesystem = fsspec.filesystem("memory")

    def write(path: str, data: bytes) -> str:
        filesystem.pipe_file(f"/{path}", data)
        return f"memory://{path}"

    yield write
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


def put_run(put: Put) -> str:
    for rank in (0, 1):
        put(f"run/rank-0000{rank}/trace.json", text_of(rank))
        rows = b"\n".join(json.dumps(row).encode() for row in STEPS)
        put(f"run/rank-0000{rank}/steps.jsonl", rows)
        put(f"run/rank-0000{rank}/rank.json", b"{}")
        put(f"run/rank-0000{rank}/samples.json", b"{}")
    put("run/run.json", b"{}")
    return "memory://run"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.mark.parametrize(
    ("path", "url"),
    [
        ("s3://bucket/run", True),
        ("memory://x", True),
        ("simplecache::s3://bucket/run", True),
        ("runs/one", False),
        ("/abs/trace.json", False),
        ("C:\\traces", False),
        (Path("s3:/bucket"), False),
    ],
)
def test_urls_and_paths_are_distinguished(path: object, url: bool) -> None:
    assert is_url(path) is url


def test_a_run_folder_is_found_with_the_files_next_to_each_trace(put: Put) -> None:
    url = put_run(put)
    found: list[Any] = find_traces(url)
    assert [str(file) for file in found] == [f"{url}/rank-0000{r}/trace.json" for r in (0, 1)]
    assert [file.side_files for file in found] == [("steps.jsonl", "rank.json", "samples.json")] * 2
    assert [size_bytes(file) for file in found] == [len(text_of(0))] * 2


def test_a_flat_folder_a_nested_one_and_a_file_are_found(put: Put) -> None:
    for name in ("b.json", "a.json.gz", "notes.txt", "clock.json"):
        put(f"flat/{name}", b"x")
    put("nested/inner/a.json", b"x")
    assert list(map(str, find_traces("memory://flat/"))) == [
        "memory://flat/a.json.gz",
        "memory://flat/b.json",
    ]
    assert list(map(str, find_traces("memory://nested"))) == ["memory://nested/inner/a.json"]
    (file,) = find_traces("memory://flat/b.json")
    assert str(file) == "memory://flat/b.json"
    assert file.side_files == ("clock.json",)  # type: ignore[union-attr]


def test_a_run_at_a_url_is_explained_with_its_measured_steps(put: Put, scratch: Path) -> None:
    url = put_run(put)
    found, _ = JobTraces([url], engine=Here()).explain()  # no other process has this one's memory
    assert [rank.rank for rank in found.ranks] == [0, 1]
    assert [rank.path for rank in found.ranks] == [f"{url}/rank-0000{r}/trace.json" for r in (0, 1)]
    assert [rank.step_ms.truth for rank in found.ranks] == [4.0, 4.0]
    assert list(scratch.iterdir()) == []


def test_a_trace_is_on_this_disk_only_while_it_is_read(put: Put, scratch: Path) -> None:
    put_run(put)
    (file, _) = find_traces("memory://run")
    with fetch(file) as path:  # type: ignore[arg-type]
        assert path.read_bytes() == text_of(0)
        names = {each.name for each in path.parent.iterdir()}
        assert names == {"trace.json", "steps.jsonl", "rank.json", "samples.json"}
        assert path.parent.name == "rank-00000"
    assert list(scratch.iterdir()) == []


def test_read_trace_takes_a_url(put: Put) -> None:
    url = put("one.json", text_of(1))
    trace = read_trace(url)
    assert (trace.rank, trace.path) == (1, url)


def test_the_cache_knows_a_trace_by_its_content(put: Put, tmp_path: Path, cache_dir: Path) -> None:
    events = json.dumps([EVENT] * 2000).encode()  # too small a file is not cached
    here = tmp_path / "a.json"
    here.write_bytes(events)
    read_trace(here)
    (entry,) = cache_dir.iterdir()
    assert read_trace(put("b.json", events)).events == 2000
    assert [each.name for each in cache_dir.iterdir()] == [entry.name]


def test_file_urls_are_paths(tmp_path: Path) -> None:
    file = tmp_path / "with space" / "a.json"
    file.parent.mkdir()
    file.write_bytes(text_of(0))
    assert find_traces(file.as_uri()) == [file]
    assert explain_job(file.parent.as_uri()).ranks[0].path == str(file)
    with pytest.raises(UnreadableInputError, match="does not exist"):
        explain_job((tmp_path / "none").as_uri())


def test_other_processes_fetch_for_themselves(tmp_path: Path) -> None:
    """`local` is a filesystem of fsspec: unlike memory it is there for any process."""
    for rank in (0, 1):
        (tmp_path / f"{rank}.json").write_bytes(text_of(rank))
    found = explain_job(f"local://{tmp_path}")
    assert [rank.path for rank in found.ranks] == [f"local://{tmp_path}/{r}.json" for r in (0, 1)]


def test_a_chained_url_keeps_its_chain(tmp_path: Path) -> None:
    from zipfile import ZipFile

    with ZipFile(tmp_path / "run.zip", "w") as archive:
        for rank in (0, 1):
            archive.writestr(f"traces/{rank}.json", text_of(rank))
    url = f"zip://traces::file://{tmp_path}/run.zip"
    expected = [f"zip://traces/{rank}.json::file://{tmp_path}/run.zip" for rank in (0, 1)]
    assert [str(file) for file in find_traces(url)] == expected
    assert [rank.rank for rank in explain_job(url).ranks] == [0, 1]


def test_errors_name_the_url_and_never_the_scratch_file(put: Put, scratch: Path) -> None:
    url = put("bad/a.json", b"not a trace")
    with pytest.raises(UnreadableInputError) as caught:
        explain_job(url)
    assert str(caught.value).startswith(url)
    assert str(scratch) not in str(caught.value)
    assert list(scratch.iterdir()) == []


def test_a_missing_url_is_unreadable_input(put: Put) -> None:
    put("empty/notes.txt", b"x")
    with pytest.raises(UnreadableInputError, match="memory://none does not exist"):
        explain_job("memory://none")
    with pytest.raises(UnreadableInputError, match="memory://empty holds no trace"):
        explain_job("memory://empty")


def test_a_service_that_fails_is_unreadable_input(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfReachError(Exception):
        pass

    def fail(self: object, *args: object, **kwargs: object) -> None:
        raise OutOfReachError("no route")

    url = put("a.json", text_of(0))
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "get_file", fail)
    with pytest.raises(UnreadableInputError, match=r"memory://a\.json: no route"):
        explain_job(url)


def test_an_unknown_protocol_is_wrong_use() -> None:
    with pytest.raises(UsageError, match="foo"):
        explain_job("foo://bucket/run")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "adlfs"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "adlfs", None)
    with pytest.raises(UsageError, match=r"abfs:// needs another package: .*adlfs"):
        explain_job("abfs://container/run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(UsageError, match=r"pip install 'stepscope\[fs\]'"):
        explain_job("s3://bucket/run")
