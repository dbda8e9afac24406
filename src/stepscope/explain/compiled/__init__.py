"""What torch.compile did, and what its graphs, breaks and compilations cost."""

from stepscope.explain.compiled.breaks import find_break_spans
from stepscope.explain.compiled.graph_kernels import open_regions
from stepscope.explain.compiled.work import explain_compiled, is_mostly_compiled

__all__ = ["explain_compiled", "find_break_spans", "is_mostly_compiled", "open_regions"]
