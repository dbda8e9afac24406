"""The step as a graph that can be edited and replayed; cost models.

Empty until its verb is built.
"""
