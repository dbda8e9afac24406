"""Fitted numbers are rows of data that say where they come from, and each of them is used."""

from __future__ import annotations

import json
import re

import pytest

from house import ROOT, SOURCE, files
from stepscope.predict.fitted import DATA, FittedNumber, fitted, read_fitted, table
from stepscope.predict.other_gpu.gpu import TransferFit

FILES = sorted(file.stem for file in DATA.glob("*.json"))


@pytest.mark.parametrize("file", FILES)
def test_every_row_says_where_its_number_comes_from(file: str) -> None:
    rows = json.loads((DATA / f"{file}.json").read_text())
    assert len(read_fitted(file)) == len(rows), "two rows have one name"
    for row in rows:
        assert tuple(row) == FittedNumber.__struct_fields__
        assert row["name"].startswith(f"{file}.")
        texts = [text for name, text in row.items() if name != "value"]
        assert all(isinstance(text, str) and text.strip() for text in texts), row["name"]
        script = row["script"]
        assert not script.endswith(".py") or (ROOT / script).is_file(), row["name"]


def test_every_row_is_used() -> None:
    code = "\n".join(file.read_text() for file in files(SOURCE))
    asked = set(re.findall(r'\b(?:fitted|table)\(\s*"([a-z_.0-9]+)"', code))
    asked |= {f"other_gpu.{field}" for field in TransferFit.__struct_fields__}
    assert asked == {name for file in FILES for name in read_fitted(file)}


def test_numbers_and_tables_are_read_by_name() -> None:
    assert fitted("kernels.floor_ns") == 2000.0
    assert table("kernels.tf32_share", tuple[float, float]) == (0.78, 0.48)
