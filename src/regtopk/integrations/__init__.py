"""Exchanges inside other people's training loops: import the module of yours, none is imported for you.

::

    huggingface.py   a callback of the Hugging Face Trainer
    accelerate.py    one call after accelerator.prepare()
    lightning.py     a callback of the Lightning Trainer
    torchft.py       replicas that come and go, with torchft
    flower/          a mod and a strategy of Flower, for clients that are sampled
    wrapped.py       what the first three share: an exchange for a model that a framework has wrapped in DDP
    beside.py        and its state, every rank's own, in the folder of a framework's checkpoint
"""
