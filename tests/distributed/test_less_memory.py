"""What takes less memory: residuals in bfloat16, and theta_start in the CPU's memory."""

from typing import Any

import torch

import regtopk
from tests.distributed import training
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.test_equals_simulator import compare, grads_of
from tests.distributed.test_updates import nesterov, train

TOPK = regtopk.TopK(density=0.1, value_code="4bit")
NARROW: dict[str, Any] = {"residual_dtype": "bfloat16"}


def test_residuals_in_bfloat16_are_those_of_the_simulator(two_ranks: Ranks) -> None:
    compare(two_ranks, TOPK, grads_of(4, num_ranks=2), **NARROW)


@on_ranks(2)
def test_theta_start_in_the_cpus_memory_changes_no_bit() -> None:
    found, states = [], []
    for anchors in ("device", "cpu"):
        net = training.make_net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        options: dict[str, Any] = {"every": 2, "outer": nesterov, "anchors": anchors, **NARROW}
        with training.closing(regtopk.UpdateExchange(net, optimizer, TOPK, **options)) as exchange:
            for step in range(7):  # the last one is inside a round
                train(net, optimizer, range(step, step + 1))
                kept = exchange._model._kept
                starts = list(exchange._model.start.values())
                assert (kept is None) == (anchors == "device")
                assert kept is None or starts[0].data_ptr() == kept.data_ptr()
                if step == 4:
                    exchange.load_state_dict(exchange.state_dict())
            saved = exchange.state_dict()
            for worker in saved["workers"].values():
                del worker["total"]
            states.append(saved)
        found.append(training.flat_parameters(net))
    assert training.same(*states)
    assert torch.equal(*found)
