"""Remedies, one file each, for use inside the training process.

Empty until its verb is built.
"""
