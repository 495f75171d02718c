"""Kernels for CUDA tensors, in two files of one name: `X.py` launches, `programs/X.py` is the Triton."""
