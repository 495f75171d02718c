"""Back to dense: a detached model trains as plain DDP does, bit for bit."""

import torch

import regtopk
from tests.distributed.ranks import on_ranks
from tests.distributed.test_updates import sgd, train
from tests.distributed.training import SMALL_BUCKETS, ddp, flat_parameters, refusal


@on_ranks(2)
def test_two_ranks() -> None:
    train_detached_and_plain()


@on_ranks(4)
def test_three_ranks_where_a_third_is_no_float() -> None:
    group = torch.distributed.new_group([0, 1, 2])
    if torch.distributed.get_rank() < 3:
        train_detached_and_plain(process_group=group)


def train_detached_and_plain(**options: object) -> None:
    """Three sparse steps; from the parameters they lead to, detached and plain training side by side."""
    model, plain = ddp(**SMALL_BUCKETS, **options), ddp(**SMALL_BUCKETS, **options)
    exchange = regtopk.attach(model, regtopk.RegTopK(density=0.1))
    for trained in (model, plain):  # both: DDP makes its buckets in the second backward
        train(trained, sgd(trained), range(3))
    sent_bytes = exchange.total.sent_bytes
    exchange.detach()
    plain.module.load_state_dict(model.module.state_dict())
    for trained in (model, plain):
        train(trained, sgd(trained), range(3, 6))
    assert exchange.num_steps == 3 and exchange.total.sent_bytes == sent_bytes
    assert exchange.total.residual_norm == 0  # what was not sent is dropped
    assert exchange.summary().endswith(
        "\n  detached  the residual was dropped; the dense steps since are not counted here"
    )
    refused = "ClusterError", "the exchange must not be used after detach()"
    assert refusal(exchange.state_dict) == refused
    assert torch.equal(flat_parameters(model), flat_parameters(plain))
