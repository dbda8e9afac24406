"""The step as a graph: what ran when, built from a trace, cleared of the profiler's cost,
replayed and edited. Know no finding and no what-if.
"""
