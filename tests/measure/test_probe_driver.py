"""The driver that operator times belong to."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from stepscope.measure.probe.timing import driver_version


def test_it_is_the_cuda_version_that_traces_name_the_driver_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Library:
        def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
            number._obj.value = 13000
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Library())
    assert driver_version() == "13000"


@pytest.mark.parametrize("library", ["no-such-library.so", "libc.so.6"])
def test_without_nvidias_library_it_is_not_known(library: str) -> None:
    assert driver_version(library) == ""
