"""Collectives as data: who sends which chunks to whom, step by step.

A schedule is the one description of an algorithm. measure/collectives runs it on tensors, predict
counts its cost, ui draws it, and proof.py checks it with symbols instead of numbers. Standard
library only: schedules are built inside ranks that have nothing but torch.

    schedule.py     a message, a schedule, where chunks begin and end
    patterns.py     all-gathers, each in a few lines; backwards they are reduce-scatters
    algorithms.py   the seven algorithms by name, for all three collectives
    proof.py        what every rank holds after every step, and whether the end is right
"""
