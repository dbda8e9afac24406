"""A recorded step on another GPU: the ratio of each kernel's time, by its shape and both GPUs."""

from __future__ import annotations

from stepscope.predict.other_gpu.kernel_time import retime

__all__ = ["retime"]
