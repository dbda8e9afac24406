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


def run_ranks(ranks: int, folder: Path, counts: str, dtypes: str = DTYPES) -> None:
    commands = [
        [sys.executable, str(SCRIPT), str(rank), str(ranks), str(folder / "store"), counts, dtypes]
        for rank in range(ranks)
    ]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    comparisons = ALGORITHMS * COLLECTIVES * len(counts.split(",")) * len(dtypes.split(","))
    for process in started:
        out, err = process.communicate(timeout=500)
        assert process.returncode == 0, err[-2000:]
        assert out.strip() == str(comparisons)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_small_odd_sizes_and_every_dtype(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, tmp_path, "0,1,7,1001")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_every_size_up_to_ten_megabytes(ranks: int, tmp_path: Path) -> None:
    counts = "0,1,2,3,4,5,8,9,63,1000,4097,65537,262145,2621440"
    run_ranks(ranks, tmp_path, counts, "float32,int64")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_dtype_with_more_ranks(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, tmp_path, "0,1,7,1001,65537")
