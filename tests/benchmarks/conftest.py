"""The benchmarks are scripts beside each other, not a package."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """A program may tell its children whose turn it is; the next test is none of them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
