"""A call that some ranks forget: the others say so after a short wait, and who it is."""

from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import regtopk
from regtopk.errors import ArgumentError
from tests.distributed.ranks import Ranks
from tests.distributed.training import closing, ddp, loss_of, make_net, refusal

TOPK = regtopk.TopK(density=0.1)
ADVICE = "; if all do, and one is only slow, give them a longer handshake_timeout_s"


def test_attach(two_ranks: Ranks) -> None:
    said = "ClusterError", f"did every rank call regtopk.attach? rank 1 has not after 0.5 s{ADVICE}"
    assert two_ranks.run(forget_attach) == [said, ("it", "forgot")]


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
    said = "ClusterError", f"did every rank call regtopk.attach? ranks 1, 3 have not after 0.5 s{ADVICE}"
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
    said = "ClusterError", f"did every rank call regtopk.Exchange? rank 0 has not after 0.5 s{ADVICE}"
    assert two_ranks.run(forget_exchange) == [None, said]


def forget_exchange() -> Any:
    answer = None
    if dist.get_rank() == 1:
        answer = refusal(lambda: regtopk.Exchange(make_net(), TOPK, handshake_timeout_s=0.5))
    dist.barrier()
    return answer


def test_gather_state_dict(two_ranks: Ranks) -> None:
    said = "ClusterError", f"did every rank call gather_state_dict? rank 1 has not after 0.5 s{ADVICE}"
    said = said[0], said[1].replace("handshake_timeout_s", "timeout_s")
    assert two_ranks.run(forget_to_gather) == [(said, ["0", "1"]), (None, None)]


def forget_to_gather() -> tuple[Any, Any]:
    """The classic mistake: only rank 0 saves. It is named, and nothing is lost."""
    exchange, said = regtopk.Exchange(make_net(), TOPK), None
    if dist.get_rank() == 0:
        said = refusal(lambda: exchange.gather_state_dict(timeout_s=0.5))
    dist.barrier()
    state = exchange.gather_state_dict()
    return said, None if state is None else sorted(state["workers"])


def test_the_timeout_of_gather_state_dict() -> None:
    exchange = regtopk.attach(make_net(), TOPK)
    with pytest.raises(ArgumentError, match=r"^timeout_s must be positive and finite, got 0$"):
        exchange.gather_state_dict(timeout_s=0)
