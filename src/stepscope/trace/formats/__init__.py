"""Trace formats: Kineto's JSON, an Nsight Systems export and a CUDA memory snapshot become
columns. Whatever is damaged is left out and counted.
"""
