"""What would it buy: the step's graph (explain/replay) edited and replayed, and cost models.

whatif.py     a trace and some what-ifs -> a prediction with an interval
whatifs/      what could be changed, one file each
context.py      what a what-if looks at
edit.py       select, scale, insert, remove, reorder
updates.py    what an optimizer's update costs, by its rule and how it is run
host_time.py  host time inside some events, taken out of the gaps it lies in
kernels.py    how long a kernel would take
alpha_beta.py how long a collective takes: latency and bandwidth fitted to a sweep
algorithms.py ring, tree and halving-doubling, compared
scale_out.py  more workers: one plan of what they exchange
scaling_curve.py  steps and throughput by number of workers
slowest.py    the slowest of several workers
buckets.py    gradients in DDP's buckets, summed one after the other
traced.py     the exchange that a trace already shows
norms.py      statistics that DDP sends before forward
transfers.py  how long collectives over so many ranks last, and who says so
exchange.py   DDP's or ZeRO's collectives put into a step
weave.py      launches, tasks and waits, all in one pass
crew.py       workers, links and buckets for many changed steps at once
outline.py    a step folded to a few moments: tables of waiting and spending
sketch.py     one changed step's outlines
crew_step.py  crew and sketch -> the step; the report's page does the same
"""
