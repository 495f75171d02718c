"""Exchanges inside other people's training loops: import the module of yours, none is imported for you.

huggingface, accelerate and lightning share `wrapped`, the exchange, and `beside`, its state on disk.
"""
