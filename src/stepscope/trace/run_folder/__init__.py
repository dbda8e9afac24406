"""What capture and `stepscope run` wrote into a run folder: ranks, steps, times, how the run
went, compiled graphs. Every file may be missing, cut short or damaged.
"""
