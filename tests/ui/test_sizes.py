"""Sizes as people type them."""

from __future__ import annotations

import pytest

from stepscope.errors import UsageError
from stepscope.ui.user_input import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("24GiB", 24 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        ("512", 512),
        ("80kb", 80_000),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text, "--memory-limit") == size


@pytest.mark.parametrize("text", ["", "GB", "8XB", "-4GB", "0", "8GB please", "1e9"])
def test_anything_else_is_wrong_use(text):
    with pytest.raises(UsageError, match=r"--memory-limit .* write 8GB"):
        parse_size(text, "--memory-limit")
