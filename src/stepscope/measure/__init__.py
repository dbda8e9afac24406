"""Lives inside the training process: torch and the standard library only.

Failures are noted and the training goes on. Nothing is written outside the run
folder. No random number is drawn, no tensor of the training is changed, no stream is synchronised.

The way in: inject/ (a sitecustomize on PYTHONPATH) -> bootstrap -> after_import -> hooks, session;
or watch.py and callbacks.py from inside the script. session.py counts the steps of one rank and
lets each part act when schedule.py says so. What the parts measure:
"""
