"""Some tests use what the benchmarks, scripts beside each other, use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
