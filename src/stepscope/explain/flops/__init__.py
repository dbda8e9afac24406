"""FLOPs and bytes of operators: a table of formulas by operator name, a file for each family.

Nothing here knows about time or about what a device can do.
"""

from stepscope.explain.flops.costs import Costs, count_costs
from stepscope.explain.flops.dtypes import DTYPES
from stepscope.explain.flops.phases import PHASES

__all__ = ["DTYPES", "PHASES", "Costs", "count_costs"]
