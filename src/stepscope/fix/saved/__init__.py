"""Keep less for the backward pass: recompute what is cheap, encode what compresses exactly.

    from stepscope.fix import save_memory

recorder.py watches one forward pass (step_record.py is what it writes down), choose.py makes the
plan (save_plan.py) by minimum cuts (selection.py, max_flow.py) and knows the peak of backward
(backward_memory.py). follower.py carries the plan out in later passes, replay.py repeats operators,
encodings.py packs masks and pooling indices, following_costs.py measures what following takes.
memory_saver.py is what users hold.
"""

from stepscope.fix.saved.memory_saver import MemorySaver as MemorySaver
from stepscope.fix.saved.memory_saver import save_memory as save_memory
from stepscope.fix.saved.save_plan import SavePlan as SavePlan
