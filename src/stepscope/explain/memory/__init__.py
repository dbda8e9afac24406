"""What filled the memory: from a capture, from a trace's allocator events, or from a snapshot.

explain/explain_memory.py puts all of it together for one rank.

captured.py   memory.json of a run folder
lifetimes.py  allocator events of a trace: each block's life, and what it was for
traced.py     a trace's peak, timeline and categories
sites.py      where held memory was allocated
timeline.py   memory through a step, thinned for charts
growth.py     does memory grow from step to step
model.py      what operators' shapes say about the model: batch, casts, a transformer
batch.py      memory against batch size: predict_peak, the largest batch that fits
theory.py     arithmetic: ZeRO stages, a transformer's activations
snapshot.py   CUDA memory snapshots
words.py      bytes in sentences
"""

from __future__ import annotations

from stepscope.explain.memory.batch import predict_peak

__all__ = ["predict_peak"]
