"""What torch.compile did, and what its graphs, breaks and compilations cost."""

from stepscope.explain.compiled.graph_kernels import open_regions
from stepscope.explain.compiled.summary import (
    explain_compiled,
    find_break_spans,
    is_mostly_compiled,
)

__all__ = ["explain_compiled", "find_break_spans", "is_mostly_compiled", "open_regions"]
