"""Damaged inputs by the thousand: `make fuzz`, and a short run in the ordinary tests.

mutate/     one file per kind of input: `mutate(rng, folder)` writes a damaged one
drive.py    puts an input through explain, what-ifs, report, terminal and JSON
sound.py    what every answer must satisfy
runner.py   many cases in worker processes, each with a time and a memory limit
corpus/     inputs that once failed; every one is replayed by the tests
"""
