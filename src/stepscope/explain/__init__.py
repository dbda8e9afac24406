"""Columns -> where time went -> findings. Never reads a file, never prints.

intervals.py    unions and differences on the time line, exact integers
work.py         what counts as the device's work, on an accelerator or on the CPU alone
timeline.py     span = compute + exposed_comm + exposed_memory + idle
idle.py         why the device waited, gap by gap
steps.py        the steps, and the steady cycle that the budget is taken over
tree.py         sums up and down the host's call tree
kernels.py operators.py modules.py lines.py launches.py copies.py syncs.py collectives.py
budget.py       the step, divided
findings/       one file a finding
rank.py         all of it for one rank
run.py          several ranks, one verdict
"""
