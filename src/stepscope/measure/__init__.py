"""Lives inside the training process: torch and the standard library only, never in the way.

Empty until its verb is built.
"""
