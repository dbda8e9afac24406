"""Lives inside the training process: torch and the standard library only.

Failures are noted and the training goes on. Nothing is written outside the run
folder. No random number is drawn, no tensor of the training is changed, no stream is synchronised.

    settings.py   what to capture, handed down to every process through the environment
    inject/       the sitecustomize that `stepscope run` puts on PYTHONPATH
    after_import.py  acts when torch is imported
    processes.py  which processes of the job are watched, and how far each came
    never_raise.py  nothing of ours ever raises into the training
    folder.py     the run folder: names, atomic writes
    ranks.py      which rank is this process
    hooks.py      where steps and phases begin and end, seen from inside torch
    dynamo.py     hides all of this from torch.compile
    session.py    one rank's capture: counts steps, lets each part act when it is due
    profiler_windows.py  opens and closes the profiler windows, makes way for the script's profiler
    rank_file.py  rank.json: what this rank is and how far it came
    schedule.py   which step does what
    optimizers.py which optimizers step, and when
    passes.py     steps of a training without a torch optimizer
    rank_parts.py what a rank writes while it trains
    steps.py      every step's times, measured without the profiler
    writer.py     lines to disk in the background, safe against a kill
    window.py     the profiler window
    kineto_messages.py  keeps Kineto's messages about our window out of the job's output
    sampler.py    Python stacks of the training thread, outside the window
    machine.py    cores, quota, context switches, other programs
    host_load.py  how busy the machine was in plain steps
    memory.py     bytes by category, in one step of its own
    storages.py   which storages hold the model, its gradients and the optimizer's state
    saved_tensors.py     what the autograd graph keeps for backward, by module
    allocator.py  the caching allocator's counters, and its history of that step
    comms.py      collectives of the window, and how the job is laid out
    flight.py     torch's flight recorder as lines of comms.jsonl
    parallel.py   groups, DDP replicas and their buckets, shards, stages
    clock.py      rounds that tie the ranks' clocks together
    ranges.py     NVTX ranges, for people who run Nsight around us
    callbacks.py  for trainers that own the loop
    watch.py      library use: with stepscope.watch() as run: ... run.step()
    calibrate/    sweeps of collectives, and the machine's ceilings
"""
