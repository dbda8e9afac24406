"""Short names for numpy's arrays in signatures; imported for type checks only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Int8s = NDArray[np.int8]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Indices = NDArray[np.intp]
Floats = NDArray[np.float64]
