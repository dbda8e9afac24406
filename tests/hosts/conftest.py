"""Fixtures for tests on several hosts; they skip where there can be none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab import Lab, why_not


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two hosts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lab(hosts=2) as two:
        yield two
