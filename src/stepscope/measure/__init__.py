"""Lives inside the training process: torch and the standard library only.

Failures are noted and the training goes on. Nothing is written outside the run
folder. No random number is drawn, no tensor of the training is changed, no stream is synchronised.

The way in: inject/ (a sitecustomize on PYTHONPATH) -> bootstrap -> hooks, session/; or watch.py
from inside the script. session/ counts the steps of one rank and lets each part act when
profiler/schedule.py says so. What the parts measure:

    hooks.py    where steps and phases begin and end, seen from inside torch
    session/    the rank: its files, special steps, trials, start-up
    steps/      every step's times, without the profiler
    profiler/   the profiler's windows and their traces; Python stacks outside of them
    memory/     bytes by category, in one step of its own
    cluster/    clocks, collectives, connections, how the job is laid out
    machine.py  how busy the machine was; compiler_log.py, cuda_graphs.py: what was compiled
    calibrate/  ceilings of the machine and the group; probe/: single operators
    fake_step.py  a script's first steps without data, for the editor
"""
