"""Ranks in processes that have imported torch."""

from typing import Any

import pytest
from torch.multiprocessing.spawn import start_processes

import tests.distributed.ranks  # noqa: F401 -- says what the processes have imported


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are forked, not spawned: a spawned one takes seconds to import torch."""

    def fork_processes(*args: Any, **options: Any) -> Any:
        return start_processes(*args, **{**options, "start_method": "forkserver"})

    monkeypatch.setattr("regtopk.lab.launch.start_processes", fork_processes)
