"""What the kernel says about the host's clock is read, and nothing is set."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from stepscope.measure.cluster import clock_sync
from stepscope.measure.cluster.clock_sync import host_clock_facts

if TYPE_CHECKING:
    from pathlib import Path


def test_this_host() -> None:
    facts = host_clock_facts()
    assert facts["host"] == os.uname().nodename
    assert facts["synchronised"] in (True, False, None)
    if not facts["synchronised"]:
        assert facts["estimated_error_ns"] is facts["maximum_error_ns"] is None


@pytest.mark.parametrize(
    ("state", "status", "expected"),
    [
        (0, 0x2001, (True, 12_000, 900_000)),
        (0, 0x0041, (False, None, None)),  # STA_UNSYNC
        (5, 0x0001, (False, None, None)),  # TIME_ERROR
    ],
)
def test_the_kernels_flags(state: int, status: int, expected: tuple[Any, ...]) -> None:
    facts = clock_sync._kernel_facts(state, status, 12, 900)
    assert tuple(facts.values()) == expected


def test_a_system_without_the_call_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no such library")

    monkeypatch.setattr(clock_sync.ctypes, "CDLL", refuse)
    facts = host_clock_facts()
    assert facts["synchronised"] is facts["estimated_error_ns"] is None


def test_ptp_devices_are_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ptp1", "ptp0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(clock_sync, "_PTP", tmp_path)
    assert host_clock_facts()["ptp_devices"] == ["ptp0", "ptp1"]
    monkeypatch.setattr(clock_sync, "_PTP", tmp_path / "none")
    assert host_clock_facts()["ptp_devices"] == []
