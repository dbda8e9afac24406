"""FLOPs and bytes of operators: formulas by operator name, one file per family.

Nothing here knows about time or about devices.
"""

from stepscope.explain.flops.call import DTYPES
from stepscope.explain.flops.costs import Costs, count_costs
from stepscope.step.phases import PHASES

__all__ = ["DTYPES", "PHASES", "Costs", "count_costs"]
