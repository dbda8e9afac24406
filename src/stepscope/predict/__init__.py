"""What a change would save: the step's graph (explain/replay), edited and replayed.

From what everything stands on to what users call:

by_text.py           what follows from a trace's texts, once per distinct text
step_context.py      one rank's step and what is known about it
worker_plan.py       what is planned about workers, and what came of it
optimizer_rules.py   update rules of optimizers and what each form costs
kernels.py           how long a kernel would take
alpha_beta.py        how long a collective takes: latency and bandwidth fitted to a sweep
algorithms.py        ring, tree and halving-doubling, compared
transfers.py         how long collectives over N ranks take, and where that is known from
parameters.py        the model's parameters
edit.py              select, scale, insert, remove, reorder
host_time.py         host time inside some events, taken out of the gaps it lies in
insert_collectives.py  launches, tasks and waits put into a graph in one pass
optimizer_updates.py which rule and form the step's optimizer has
buckets.py           gradients in DDP's buckets, summed one after the other
norm_buffers.py      batch-norm statistics that DDP sends before forward
traced_exchange.py   the exchange that a trace already shows
exchange.py          DDP's or ZeRO's collectives put into a step
slowest_worker.py    the slowest of several workers
peaks.py             peak memory with another batch, or with blocks recomputed
batch_growth.py      a step with more samples or fewer
outcome.py           what a what-if gives back
values.py            values that users write
scale_out.py         a step with other workers, links or buckets
declaration.py       what a what-if declares about itself
whatifs/             the what-ifs, one file each
whatif.py            a trace and some what-ifs -> a prediction with an interval
scaling_curve.py     steps and throughput by number of workers
"""
