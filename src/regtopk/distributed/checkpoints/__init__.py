"""Checkpoints of a whole run, in a folder that survives kills; `folder` has `Checkpoints`."""
