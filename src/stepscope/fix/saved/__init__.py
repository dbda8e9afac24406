"""Keep less for the backward pass: recompute what is cheap, encode what compresses exactly.

    from stepscope.fix import save_memory

recorder.py watches one forward pass (step_record.py is what it writes down), choose.py makes the
plan (save_plan.py) by minimum cuts (selection.py, max_flow.py) and knows the peak of backward
(backward_memory.py). follower.py carries the plan out once, watching every operator (pinning.py);
pin_plan.py ties it to saved tensors and autograd's nodes (node_patterns.py, pinned_plan.py), and
pinned_follower.py carries it out from then on. replay.py repeats operators, encodings.py packs
masks and pooling indices, following_costs.py measures what following takes. attach.py is the front
door, memory_saver.py what users hold, compiled_saver.py the same for compiled models.
"""

from stepscope.fix.saved.attach import save_memory as save_memory
from stepscope.fix.saved.memory_saver import MemorySaver as MemorySaver
from stepscope.fix.saved.save_plan import SavePlan as SavePlan
