"""Keep less for the backward pass: recompute, encode or offload what backward keeps.

    from stepscope.fix import save_memory

recorder.py watches one forward pass (step_record.py is what it writes down, with the options that
encodings/ measured and those that offload_offers.py adds). choose.py makes the plan (save_plan.py):
plan_search.py looks for it by minimum cuts (selection.py, max_flow.py), backward_memory.py knows
the peak of backward and step_memory.py that of the whole step; promise.py says what to expect.
follower.py carries the plan out once, watching every operator (pinning.py); pin_plan.py ties it to
saved tensors and autograd's nodes (node_patterns.py, pinned_plan.py), and pinned_follower.py
carries it out from then on. replay.py repeats operators, following_costs.py measures what following
takes. attach.py is the front door, memory_saver.py what users hold, compiled_saver.py the same for
compiled models; run_file.py and plan_timeline.py are for the report.
"""

from stepscope.fix.saved.attach import save_memory as save_memory
from stepscope.fix.saved.memory_saver import MemorySaver as MemorySaver
from stepscope.fix.saved.save_plan import SavePlan as SavePlan
