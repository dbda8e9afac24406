"""The algorithms on real processes, against torch's own collectives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("check_ranks.py")
DTYPES = "float32,float64,float16,bfloat16,int32,int64,uint8,bool"
ALGORITHMS, COLLECTIVES = 7, 3


def run_ranks(sizes: list[int], folder: Path, counts: str, dtypes: str = DTYPES) -> None:
    words = [str(folder / "store"), ",".join(map(str, sizes)), counts, dtypes]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    comparisons = ALGORITHMS * COLLECTIVES * len(counts.split(",")) * len(dtypes.split(","))
    assert done.stdout.strip() == str(comparisons * len(sizes))


def test_two_to_five_ranks_and_odd_sizes(tmp_path: Path) -> None:
    run_ranks([2, 3, 4, 5], tmp_path, "0,1,1001", "float32,int64")


@pytest.mark.slow
def test_every_dtype(tmp_path: Path) -> None:
    run_ranks([2, 3, 4, 5, 8], tmp_path, "0,1,7,1001,65537")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_every_size_up_to_ten_megabytes(ranks: int, tmp_path: Path) -> None:
    counts = "0,1,2,3,4,5,8,9,63,1000,4097,65537,262145,2621440"
    run_ranks([ranks], tmp_path, counts, "float32,int64")
