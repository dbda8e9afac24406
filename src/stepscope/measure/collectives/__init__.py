"""Collectives on send and receive: any schedule of records/collectives, run on tensors.

Here and not in fix: nobody trains with these. They are what calibrate --algorithms measures, inside
ranks that a launcher started, with torch and the standard library only.

    plan.py     one rank's part of a schedule, and when each receive may be posted
    runner.py   runs a plan on a tensor
    calls.py    all_reduce, all_gather and reduce_scatter by algorithm, as torch has them
"""
