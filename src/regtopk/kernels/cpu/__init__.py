"""Kernels for CPU tensors: loops compiled by numba, and numpy for short rows."""
