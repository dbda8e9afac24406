"""A against B: did it really change?

Empty until its verb is built.
"""
