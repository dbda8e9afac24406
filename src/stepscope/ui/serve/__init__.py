"""stepscope serve: the runs of a folder in a browser of this machine.

`runs_directory` finds run folders, `run_index` remembers what is in them, `worker_process` has the
heavy work done by a child process (ui/serve_worker), `guard` decides who may ask, `app` answers,
`live` follows running jobs. Run folders are only read; who asks a job for a window writes one file.
"""
