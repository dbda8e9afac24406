"""Fixtures for tests on several hosts; they skip where there can be none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from jobs_on_hosts import run
from lab import HostOutcome, Lab, why_not


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two hosts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lab(hosts=2) as two:
        yield two


@pytest.fixture(scope="session")
def bare() -> Mapping[str, HostOutcome]:
    """The training without stepscope: two hosts, one rank on each, 20 steps. The first losses of a
    longer training are those of a shorter one, so that all tests compare theirs with these."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lab(hosts=2) as two:
        return run(two, env={"STEPS": "20"})
