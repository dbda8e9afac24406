"""Random nets with everything that can carry behaviour are a benchmark, too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
