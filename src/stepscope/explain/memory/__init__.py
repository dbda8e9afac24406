"""What filled the memory: from a capture, from a trace's allocator events, or from a snapshot.

explain/rank.py puts all of it together for one rank.
"""

from __future__ import annotations

from stepscope.explain.memory.captured import predict_peak

__all__ = ["predict_peak"]
