"""What an exchange says: counts that add up, as numbers, as text and on a board; and a wrong optimizer."""

import gc
import re
import time
import weakref
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import regtopk
from regtopk.core.codes import full_message_bytes, segment_bytes
from regtopk.core.traffic import all_reduce_bytes
from tests.distributed import training
from tests.distributed.ranks import on_ranks
from tests.distributed.training import closing, ddp, listening, loss_of, make_net, refusal

J = 3363
COUNTS = ["payload_bytes", "sent_bytes", "received_bytes", "dense_bytes", "num_entries", "num_skipped"]
TIMES = ["select_s", "encode_s", "collective_s", "decode_s"]


@on_ranks(2)
def test_counts_add_up() -> None:
    model, writer = DistributedDataParallel(training.make_net()), Mock()
    algorithm = regtopk.RegTopK(density=0.1)
    with training.closing(regtopk.attach(model, algorithm, writer=writer)) as exchange:
        records = []
        for step in range(120):  # more than the clocks that are kept unread
            model.zero_grad()
            training.loss_of(model, step % 5).backward()
            if step >= 110:
                records.append(exchange.last_step)
        total = exchange.total
        for name in COUNTS:
            assert len({getattr(record, name) for record in records}) == 1  # every step sends the same
            assert getattr(total, name) == 120 * getattr(records[0], name)
        assert total.dense_bytes == 120 * all_reduce_bytes(4 * J, 2)
        assert total.num_entries == 120 * round(0.1 * J)
        assert all(getattr(total, name) >= 10 * min(getattr(r, name) for r in records) > 0 for name in TIMES)
        state = exchange.state_dict()["workers"][str(dist.get_rank())]["entries"]
        norm = torch.cat([entry["residual"].flatten() for entry in state.values()]).norm()
        assert total.residual_norm == pytest.approx(float(norm), rel=1e-6)
        scalars = [call.args for call in writer.add_scalar.call_args_list]  # as TensorBoard would draw them
        names = [f"regtopk/{name}" for name in total.as_dict()]
        drawn = [(name, step) for step in range(1, 121) for name in names]
        assert [(tag, step) for tag, _, step in scalars] == drawn
        assert {x for tag, x, _ in scalars if tag == "regtopk/sent_bytes"} == {records[0].sent_bytes}
        check_summary(exchange.summary(), total)


@on_ranks(2)
def test_a_writer_that_fails_does_not_end_training() -> None:
    results, full = [], Mock()
    full.add_scalar.side_effect = OSError("no space left on device")
    for writer in (full, None):
        model = DistributedDataParallel(training.make_net())
        algorithm = regtopk.RegTopK(density=0.1)
        with training.closing(regtopk.attach(model, algorithm, writer=writer)) as exchange:
            with training.listening() as said:
                for step in range(3):
                    training.loss_of(model, step).backward()
            results.append((training.flat_gradients(model), training.algorithm_state(exchange)))
        text = "the writer failed and gets no more numbers: OSError: no space left on device"
        assert said == ([text] if writer else [])
    full.add_scalar.assert_called_once()
    assert training.same(*results)


def check_summary(text: str, total: Any) -> None:
    lines = text.splitlines()[:7]  # on a busy machine a slow rank follows
    title, sent, received, dense, times, waiting, residual = lines
    assert title == "regtopk: 120 steps on 2 workers; this rank:"
    assert re.fullmatch(r"  sent      [\d.]+ kB per step, [\d.]+ kB in all; 336 entries per step", sent)
    assert f"{total.sent_bytes / 120 / 1000:.3g} kB per step" in sent
    assert received == f"  received  {sent[12:].partition(';')[0]}"  # two ranks get what they give
    less = total.dense_bytes / total.received_bytes
    assert dense == (
        f"  dense     {4 * J / 1000:.3g} kB per step: a ring all_reduce of float32 would receive "
        f"{less:.1f} times as much, of bfloat16 {less / 2:.1f}"
    )
    assert re.fullmatch(
        r"  time      select [\d.]+ · encode [\d.]+ · collective [\d.]+ · decode [\d.]+ ms per step;", times
    )
    assert waiting == "            collective includes waiting for the slowest rank"
    assert residual == f"  residual  norm {total.residual_norm:.4g}"


@on_ranks(4)
def test_the_slow_rank_is_named() -> None:
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    net = training.make_net()
    exchange = regtopk.Exchange(net, regtopk.TopK(density=0.1), process_group=group)
    for _ in range(12):
        net(training.batch(0)).sum().backward()
        if dist.get_rank() == 2:  # 1 in its group
            time.sleep(0.1)
        exchange.step()
    (line,) = [line for line in exchange.summary().splitlines() if line.startswith("  slowest")]
    found = re.fullmatch(r"  slowest   rank 2 kept the others waiting for (\d+) % of the time", line)
    assert found is not None and 5 <= int(found[1]) <= 100


@on_ranks(2)
def test_one_rank_alone_sends_nothing() -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    net = training.make_net()
    with training.listening() as said:
        exchange = regtopk.Exchange(net, regtopk.TopK(density=0.1), process_group=groups[dist.get_rank()])
    assert said == ["there is one rank: its gradients are sparsified, but no bytes are saved"]
    net(training.batch(0)).sum().backward()
    exchange.step()
    assert exchange.total.sent_bytes == exchange.total.received_bytes == exchange.total.dense_bytes == 0
    assert exchange.total.payload_bytes > 0 and "times as much" not in exchange.summary()


@pytest.mark.parametrize(("impute", "weights"), [(0.0, None), (0.5, None), (0.5, (0.4, 0.3, 0.2, 0.1))])
@on_ranks(4)
def test_a_split_sends_messages_and_who_sent_if_it_imputes(impute: float, weights: Any) -> None:
    """All entries lie in the first rank's region: it receives them and sends the sum; others send theirs.

    Who sent is a byte per entry if weights are equal, otherwise a float.
    """
    k, region = 50, 1000
    vector = torch.nn.Parameter(torch.zeros(4 * region))
    exchange = regtopk.Exchange(
        [("vector", vector)],
        regtopk.TopK(k=k, impute=impute),
        collective="split",
        weight=weights and weights[dist.get_rank()],
    )
    vector.grad = torch.zeros(4 * region)
    vector.grad[:k] = torch.arange(1.0, k + 1)
    exchange.step()
    full, empty = (
        full_message_bytes(count, region, dtype=torch.float32, value_code="float32", index_code="elias-fano")
        for count in (k, 0)
    )
    sums, no_sums = full, empty
    if impute:
        code = "int8" if weights is None else "float32"
        sums += segment_bytes(k, dtype=torch.float32, value_code=code)
        no_sums += segment_bytes(0, dtype=torch.float32, value_code=code)
    moved = (exchange.last_step.sent_bytes, exchange.last_step.received_bytes)
    if dist.get_rank() == 0:
        assert moved == (3 * empty + 3 * sums, 3 * full + 3 * no_sums)
    else:
        assert moved == (full + 2 * empty + 3 * no_sums, 3 * empty + sums + 2 * no_sums)


MESSAGE = (
    "dgc keeps a momentum of its own, and the optimizer has one, too (SGD with momentum=0.9): steps become "
    "many times too long. Use torch.optim.SGD without momentum, or an algorithm without one, such as TopK"
)
ADAM = (
    "topk sends an entry rarely, as one large value, which spoils Adam's second moments: exchange what it "
    "changed, by regtopk.UpdateExchange, or use torch.optim.SGD"
)


def by_hook(net: Any, algorithm: Any, **options: Any) -> Any:
    state = regtopk.SparseHookState(net, algorithm, **options)
    net.register_comm_hook(state, regtopk.sparse_hook)
    return state


WAYS = (regtopk.attach, by_hook, lambda net, way: regtopk.Exchange(net.module.parameters(), way))


def said_of(algorithm: Any, make: Any, way: Any = regtopk.attach, *, is_given: bool = False) -> list[str]:
    """What is logged when an exchange is made, and in two steps."""
    net = ddp()
    optimizer = make(net.parameters())
    with listening() as said:
        with closing(way(net, algorithm, **({"optimizer": optimizer} if is_given else {}))) as exchange:
            assert len(said) <= is_given
            for step in range(2):
                other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
                other.step()  # which trains something else
                loss_of(net, step).backward()
                getattr(exchange, "step", bool)()  # by hand
                optimizer.step()
        return list(said)


def sgd(parameters: Any, momentum: float = 0.9) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


@on_ranks(2)
def test_two_momenta_are_said_once_on_rank_0() -> None:
    dgc, told = regtopk.DGC(density=0.1), [MESSAGE] * (dist.get_rank() == 0)
    assert [said_of(dgc, sgd, way) for way in WAYS] == [told] * 3
    assert said_of(dgc, sgd, is_given=True) == told
    adam = said_of(dgc, torch.optim.AdamW)
    assert len(adam) == len(told) and all("AdamW with betas=(0.9, 0.999)" in line for line in adam)
    for momentum in (0.9, 0.0):
        net = make_net()
        optimizer = sgd(net.parameters(), momentum)
        with listening() as said, closing(regtopk.UpdateExchange(net, optimizer, dgc)):
            assert said == (told if momentum else [])
    quiet = [
        said_of(dgc, lambda parameters: sgd(parameters, momentum=0.0)),
        said_of(regtopk.DGC(density=0.1, momentum=0.0), sgd),
        said_of(regtopk.TopK(density=0.1), sgd, is_given=True),
    ]
    assert quiet == [[], [], []]
    given: Any = "adam"
    kind, text = refusal(lambda: regtopk.attach(ddp(), dgc, optimizer=given))
    assert kind == "ArgumentError" and "optimizer" in text and "str" in text


@on_ranks(2)
def test_a_model_may_go_inside_a_step_of_another_optimizer() -> None:
    held: list[Any] = [ddp()]
    gone = weakref.ref(held[0])

    def lose(*_: Any) -> None:
        held.clear()
        gc.collect()

    hook = register_optimizer_step_pre_hook(lose)  # others follow it
    regtopk.attach(held[0], regtopk.TopK(density=0.1)).detach()
    sgd([nn.Parameter(torch.zeros(1))]).step()
    hook.remove()
    assert gone() is None


@on_ranks(2)
def test_adam_behind_a_sparse_gradient_is_said_once_on_rank_0() -> None:
    topk, told = regtopk.TopK(density=0.1), [ADAM] * (dist.get_rank() == 0)
    assert [said_of(topk, torch.optim.Adam, way) for way in WAYS] == [told] * 3
    assert said_of(topk, torch.optim.Adam, is_given=True) == told
    for quiet in (regtopk.Dense(), regtopk.EF21(density=0.1)):  # every entry arrives in every step
        assert said_of(quiet, torch.optim.Adam) == []
    net = make_net()
    for outer in (None, torch.optim.Adam):  # only an outer one gets what is sparse
        adam = torch.optim.Adam(net.parameters())
        with listening() as said, closing(regtopk.UpdateExchange(net, adam, topk, outer=outer)):
            assert len(said) == len(told if outer else ())
            assert all(line.endswith("let outer make a torch.optim.SGD") for line in said)
