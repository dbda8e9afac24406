"""Profiles on disk: the same after a round trip, never another host's, never half a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepscope.errors import UnreadableInputError, UsageError
from stepscope.records.hardware import CollectiveFit, MeasuredSize, Profile, Segment
from stepscope.trace.machine_profiles import (
    find_profile,
    load_profiles,
    node_name,
    profiles_folder,
    read_profile,
    save_profile,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_PROFILES", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def a_fit(kind: str = "all_reduce", group: str = "world", group_size: int = 2) -> CollectiveFit:
    return CollectiveFit(
        kind=kind,
        group=group,
        group_size=group_size,
        segments=(
            Segment(from_bytes=1024, to_bytes=4096, alpha_ns=1000.5, beta_ns_per_byte=0.25),
            Segment(from_bytes=4096, to_bytes=8192, alpha_ns=2000.0, beta_ns_per_byte=0.125),
        ),
        measured=(MeasuredSize(size_bytes=1024, time_ns=1300, low_ns=1200, high_ns=1400),),
        passes=5,
        noise=0.03,
        held_out=0.04,
        held_out_sizes=0.05,
    )


def a_profile(**changes: Any) -> Profile:
    values: dict[str, Any] = {
        "host": node_name(),
        "device": "NVIDIA H200",
        "kind": "cuda",
        "torch": "2.11.0",
        "when_unix": 1000.0,
        "world_size": 2,
        "backend": "nccl",
        "threads": 16,
        "matmul_flops": {"bf16": 7.9e14, "fp32": 5e13},
        "copy_bytes_s": 4.3e12,
        "launch_ns": 2100.0,
        "spread": {"copy_bytes_s": 0.01},
        "fits": (a_fit(),),
    }
    return Profile(**values | changes)


def test_a_profile_is_the_same_after_a_round_trip(folder: Path) -> None:
    path = save_profile(a_profile())
    assert path == folder / f"{node_name()}-NVIDIA_H200-nccl-2.json"
    assert read_profile(path) == a_profile()
    assert load_profiles() == (a_profile(),)


def test_the_older_one_is_kept(folder: Path) -> None:
    save_profile(a_profile(when_unix=1.0))
    path = save_profile(a_profile(when_unix=2.0))
    assert read_profile(path).when_unix == 2.0
    assert read_profile(path.with_name(path.name + ".previous")).when_unix == 1.0
    assert len(load_profiles()) == 1
    assert {entry.name for entry in folder.iterdir()} == {path.name, path.name + ".previous"}


def test_another_hosts_profile_is_never_found_unless_asked_for() -> None:
    save_profile(a_profile(host="elsewhere"))
    assert find_profile() is None
    assert load_profiles(node_name()) == ()
    asked = find_profile("elsewhere")
    assert asked is not None
    assert asked.host == "elsewhere"


def test_the_newest_that_fits_is_found() -> None:
    save_profile(a_profile(when_unix=1.0))
    save_profile(a_profile(when_unix=3.0, world_size=1, backend=None, fits=()))

    def found(**asked: Any) -> float | None:
        profile = find_profile(**asked)
        return profile and profile.when_unix

    assert found() == 3.0
    assert found(collective="all_reduce") == 1.0
    assert found(collective="broadcast") is None


def test_fits_are_found_by_exact_group_size() -> None:
    fits = (
        a_fit(group_size=4),
        a_fit(group="inter-host"),
        a_fit(group="pairs"),
        a_fit("broadcast", group_size=4),
    )
    profile = a_profile(fits=fits)
    assert profile.fit_for("all_reduce", 4) is fits[0]
    assert profile.fit_for("all_reduce", 2) is fits[1]
    assert profile.fit_for("all_reduce", 2, "pairs") is fits[2]
    assert profile.fit_for("all_reduce", 8) is None
    assert profile.fit_for("broadcast", 2) is None


def test_expected_time_uses_the_segment_of_the_size() -> None:
    fit = a_fit()
    assert fit.expected_ns(0) == 1000.5
    assert fit.expected_ns(4096) == 1000.5 + 1024
    assert fit.expected_ns(4097) == 2000 + 4097 / 8
    assert fit.expected_ns(1 << 20) == 2000 + (1 << 17)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not a profile"),
        (b"\xff\xfe", "is not a profile"),
        (b"[]", "is not a profile"),
        (b'{"host": "here"}', "missing required field"),
        (msgspec.json.encode(a_profile(schema=99)), "schema 99"),
        (msgspec.json.encode(a_profile())[:-40], "is not a profile"),
    ],
)
def test_broken_files_are_said_or_skipped(folder: Path, content: bytes, says: str) -> None:
    save_profile(a_profile())
    broken = folder / "broken.json"
    broken.write_bytes(content)
    with pytest.raises(UnreadableInputError, match=says) as caught:
        load_profiles()
    assert str(broken) in str(caught.value)
    assert load_profiles(skip_broken=True) == (a_profile(),)
    assert find_profile() == a_profile()


def test_fields_of_later_versions_are_ignored(folder: Path) -> None:
    path = save_profile(a_profile())
    later = msgspec.json.decode(path.read_bytes()) | {"one_more": 1}
    path.write_bytes(msgspec.json.encode(later))
    assert read_profile(path) == a_profile()


def test_no_folder_is_no_profile() -> None:
    assert load_profiles() == ()
    assert find_profile() is None


def test_a_folder_that_cannot_be_written_is_said(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file")
    with pytest.raises(UsageError, match="STEPSCOPE_PROFILES"):
        save_profile(a_profile())


def test_where_profiles_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STEPSCOPE_PROFILES")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert profiles_folder() == tmp_path / "stepscope" / "profiles"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert profiles_folder() == tmp_path / ".config" / "stepscope" / "profiles"


def test_a_profile_that_is_a_pipe_is_refused_and_costs_nothing_else(folder: Path) -> None:
    save_profile(a_profile())
    os.mkfifo(folder / "a.json")
    with pytest.raises(UnreadableInputError, match="not a regular file"):
        load_profiles()
    assert len(load_profiles(None, skip_broken=True)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 10**12}, {"when_unix": 1e300}, {"matmul_flops": {"fp32": -1.0}},
        {"copy_bytes_s": 0.0}, {"launch_ns": -5.0}, {"threads": -1}, {"cores": 1e9},
    ],
)  # fmt: skip
def test_what_nobody_can_have_measured_is_no_profile(folder: Path, changes: dict[str, Any]) -> None:
    path = save_profile(a_profile(**changes))
    with pytest.raises(UnreadableInputError, match="is not a profile"):
        read_profile(path)


def test_a_fit_without_segments_is_no_fit(folder: Path) -> None:
    path = save_profile(a_profile(fits=(msgspec.structs.replace(a_fit(), segments=()),)))
    with pytest.raises(UnreadableInputError, match="is not a profile"):
        read_profile(path)
