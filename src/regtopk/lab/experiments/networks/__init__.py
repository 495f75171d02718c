"""Networks of simulated workers, whose copies live in flat vectors, and the gradients of many copies.

Networks have no hidden state and no random layers, and can be captured in a CUDA graph.
"""
