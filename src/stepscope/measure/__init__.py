"""Lives inside the training process: torch and the standard library only.

Failures are noted and the training goes on. Nothing is written outside the run
folder. No random number is drawn, no tensor of the training is changed, no stream is synchronised.

The way in: inject/ (a sitecustomize on PYTHONPATH) -> bootstrap -> after_import -> hooks, session;
or watch.py and callbacks.py from inside the script. session.py counts the steps of one rank and
lets each part act when schedule.py says so. What the parts measure:

    steps.py      every step's times, without the profiler (optimizers, passes, closures)
    step_notes.py, step_clock.py, fetches.py  notes of the training thread, and times from them
    rare_phases.py  evaluation, checkpoints, garbage collections, torch.compile
    step_meter.py, batch_elements.py, start_up.py  what else is noted: waits, memory, batches
    profiler_windows.py, window.py, trace_file.py  the profiler's windows and their traces
    sampler.py    Python stacks of the training thread, outside the windows
    memory.py     bytes by category, in one step of its own (storages, saved_tensors, allocator)
    comms.py      collectives of the window, and how the job is laid out (flight, parallel)
    clock.py      rounds that tie the ranks' clocks together
    thread_counters.py  a thread's time on a core and without one, for bench
    host_load.py  how busy the machine was in plain steps (machine)
    calibrate/    sweeps of collectives, and the machine's ceilings
"""
