"""Keep less for the backward pass: recompute, encode or offload what backward keeps.

    from stepscope.fix import save_memory

recorder.py watches one forward pass, planner.py decides what to keep (selection.py by minimum cuts,
memory_model.py by the peaks of backward and of the step), follower.py carries the plan out once and
pinned_plan.py ties it to saved tensors and autograd's nodes. attach.py is the front door,
memory_saver.py what users hold.
"""

from stepscope.fix.saved.attach import save_memory as save_memory
from stepscope.fix.saved.memory_saver import MemorySaver as MemorySaver
from stepscope.fix.saved.save_plan import SavePlan as SavePlan
