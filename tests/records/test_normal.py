"""Our medians and quantiles are numpy's, to the last bit, without loading numpy.ma."""

import math
import subprocess
import sys

import numpy as np
import pytest

from stepscope.records.normal import median, medians, quantile

RANDOM = np.random.default_rng(0)
COLUMNS = [
    (RANDOM.normal(size=rows) * 10.0 ** RANDOM.integers(-3, 9)).astype(kind)
    for rows in (1, 2, 3, 8, 33)
    for kind in (np.float64, np.int64)
    for _ in range(20)
]


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99, 1])
def test_quantiles_are_those_of_numpy(share):
    assert [quantile(column, share) for column in COLUMNS] == [
        np.quantile(column, share) for column in COLUMNS
    ]


def test_medians_are_those_of_numpy():
    assert [median(column) for column in COLUMNS] == [np.median(column) for column in COLUMNS]
    table = RANDOM.normal(size=(6, 5))
    assert (medians(table) == np.median(table, axis=0)).all()
    assert (medians(table, axis=1) == np.median(table, axis=1)).all()
    assert median(table) == np.median(table)


def test_nothing_and_not_a_number_have_no_median():
    assert math.isnan(median([]))
    assert math.isnan(median([1.0, math.nan, 2.0]))


def test_the_training_process_loads_no_numpy():
    code = "import sys, stepscope.records.normal; assert 'numpy' not in sys.modules"
    subprocess.run((sys.executable, "-c", code), check=True)
