"""A script that ends with an error in backward ends with that error, not with a signal."""

import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from tests.distributed.ranks import fork_process
from tests.processes import ended

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import regtopk
from tests.distributed.training import loss_of, make_net

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
net = make_net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
exchange = regtopk.UpdateExchange(net, optimizer, regtopk.TopK(density=0.1), every=2, delay=1)
for step in range(2):
    loss_of(net, step).backward()
    optimizer.step()
net.first.bias.register_hook(lambda grad: 1 / 0)
loss_of(net, 2).backward()
"""


def test_an_error_in_backward(tmp_path: Path) -> None:
    """One rank is a process of its own, whose end is looked at; the other is there for it."""
    store = str(tmp_path / "store")
    other, _ = fork_process(run_as_the_other, store)
    try:
        words = [sys.executable, "-c", SCRIPT, "0", store]
        with ended(subprocess.Popen(words, stderr=subprocess.PIPE, text=True)) as process:
            _, said = process.communicate(timeout=300)
    finally:
        other.kill()
        other.join()
    assert process.returncode == 1, said  # -6 if the exchange's thread outlived Python
    assert "ZeroDivisionError" in said


def run_as_the_other(pipe: Connection, store: str) -> None:
    sys.argv = ["-c", "1", store]
    with suppress(ZeroDivisionError):
        exec(SCRIPT, {})
