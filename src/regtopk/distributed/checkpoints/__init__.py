"""Checkpoints of a whole run, in a folder that survives kills.

::

    folder.py      Checkpoints: what the ranks agree on when they save and load
    manifest.py    what a rank's manifest holds
    files.py       the files of a save: a file is whole or not there
    choice.py      which save to go on from, and which ones stop a run
    loading.py     one save on its way into modules, optimizers and exchanges
    copies.py      states: copied when they are saved, compared with what they are loaded into
"""
