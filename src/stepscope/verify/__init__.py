"""A against B: did the step really change, and did it keep what was promised?

`compare` puts it together. change, spread and correlation are the statistics; runs and step_lists
read the input; differences and workload find what else changed; track_record holds promises and
what was measured of them. Nothing here starts a process: `ui` runs commands and passes their run
folders on.
"""
