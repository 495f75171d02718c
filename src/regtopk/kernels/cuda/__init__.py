"""Kernels for CUDA tensors: what is launched, on which memory; the Triton programs are in `programs`."""
