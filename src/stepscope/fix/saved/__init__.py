"""Keep less for the backward pass: recompute or encode what backward keeps.

    from stepscope.fix import save_memory

recorder.py watches one forward pass, planner.py decides what to keep (selection.py by minimum cuts,
memory_model.py by the peaks of backward and of the step), follower.py carries the plan out and
replay.py repeats operators when backward asks. attach.py is the front door, memory_saver.py what
users hold.
"""

from stepscope.fix.saved.attach import save_memory as save_memory
from stepscope.fix.saved.memory_saver import MemorySaver as MemorySaver
from stepscope.fix.saved.save_plan import SavePlan as SavePlan
from stepscope.fix.saved.step_promise import SavePromise as SavePromise
