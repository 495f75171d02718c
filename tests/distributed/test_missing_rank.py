"""A call that some ranks forget: the others say so after a short wait, and who it is."""

import logging
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.distributed.collectives import Collectives
from tests.distributed.ranks import Ranks
from tests.distributed.training import closing, ddp, loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)
FORGOT = "ClusterError", "did every rank call regtopk.attach? rank 1 has not after 0.5 s"


def test_attach(two_ranks: Ranks) -> None:
    assert two_ranks.run(forget_attach) == [FORGOT, ("it", "forgot")]


def forget_attach() -> tuple[str, str]:
    model = ddp()
    answer = "it", "forgot"
    if dist.get_rank() == 0:
        answer = refusal(lambda: regtopk.attach(model, TOPK, handshake_timeout_s=0.5))
    dist.barrier()
    with closing(regtopk.attach(model, TOPK)) as exchange:  # once all call it, it works
        loss_of(model, 0).backward()
        assert exchange.num_steps == 1
    return answer


def test_attach_in_a_subgroup(four_ranks: Ranks) -> None:
    said = "ClusterError", "did every rank call regtopk.attach? ranks 1, 2 have not after 0.5 s"
    assert four_ranks.run(forget_attach_in_a_subgroup) == [said, None, None, None]


def forget_attach_in_a_subgroup() -> Any:
    group = dist.new_group([0, 1, 3])
    if dist.get_rank() == 2:
        return None
    model = DistributedDataParallel(make_net(), process_group=group)
    if dist.get_rank() == 0:
        return refusal(lambda: regtopk.attach(model, TOPK, handshake_timeout_s=0.5))
    return None


def test_exchange(two_ranks: Ranks) -> None:
    said = "ClusterError", "did every rank call regtopk.Exchange? rank 0 has not after 0.5 s"
    assert two_ranks.run(forget_exchange) == [None, said]


def forget_exchange() -> Any:
    answer = None
    if dist.get_rank() == 1:
        answer = refusal(lambda: regtopk.Exchange(make_net(), TOPK, handshake_timeout_s=0.5))
    dist.barrier()
    return answer


class TellsTheOther(logging.Handler):
    """Passes a warning on to the rank that it is about."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())
        self.store.set("said", "it")


def test_gather_state_dict_is_waited_for(two_ranks: Ranks) -> None:
    """The late rank may be writing or evaluating: it is named, and not given up."""
    said = "did every rank call gather_state_dict? rank 1 has not after 0.5 s; waiting on"
    assert two_ranks.run(gather_late) == [([said], ["0", "1"]), ([], None)]


def gather_late() -> tuple[list[str], Any]:
    exchange = regtopk.Exchange(make_net(), TOPK, handshake_timeout_s=0.5)
    assert dist.group.WORLD is not None
    listener = TellsTheOther(Collectives(dist.group.WORLD).store)
    logging.getLogger("regtopk").addHandler(listener)
    try:
        if dist.get_rank() == 1:
            listener.store.wait(["said"])
        state = exchange.gather_state_dict()
    finally:
        logging.getLogger("regtopk").removeHandler(listener)
    return listener.said, None if state is None else sorted(state["workers"])
