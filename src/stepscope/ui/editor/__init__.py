"""What editors show: the cost of each line, estimates, edits followed, the batch size.

Plain functions on paths and texts; the language server and `serve` are thin over them.
"""

from stepscope.ui.editor.batch_curve import batch_curve, batch_for
from stepscope.ui.editor.batch_place import batch_in_source, text_with_batch
from stepscope.ui.editor.estimate import check_syntax, estimate_script
from stepscope.ui.editor.follow import follow
from stepscope.ui.editor.measured import line_costs_of
from stepscope.ui.editor.profile_child import ProfiledScript
from stepscope.ui.editor.profile_script import profile_script

__all__ = [
    "ProfiledScript",
    "batch_curve",
    "batch_for",
    "batch_in_source",
    "check_syntax",
    "estimate_script",
    "follow",
    "line_costs_of",
    "profile_script",
    "text_with_batch",
]
