"""What would it buy: the step's graph (explain/replay) edited and replayed, and cost models.

whatif.py     a trace and some what-ifs -> a prediction with an interval
whatifs/      what could be changed, one file each
scene.py      what a what-if looks at
edit.py       select, scale, insert, remove, reorder
host_time.py  host time inside some events, taken out of the gaps it lies in
kernels.py    how long a kernel would take
alpha_beta.py how long a collective takes: latency and bandwidth fitted to a sweep
algorithms.py ring, tree and halving-doubling, compared
"""
