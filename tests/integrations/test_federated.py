"""A server and clients that it asks now and then: nothing is lost, and nothing stale is taken for fresh."""

import random
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regtopk import ALGORITHMS, ChunkedTopK, Consensus, PosteriorScore, RegTopK, TopK
from regtopk.core import Algorithm, SparseGradient
from regtopk.errors import RegtopkError
from regtopk.integrations.flower.client import Client, check_algorithm, pack, unpack
from regtopk.integrations.flower.messages import Instruction, Model, Reply
from regtopk.integrations.flower.server import Server
from regtopk.simulate import Cluster
from regtopk.wire import decode, encode
from tests.distributed.training import refusal

J = 60
SHARES = {"a": 3.0, "b": 1.0, "c": 4.0}
UPDATE = torch.linspace(-1, 1, J)


def model_of(flat: Tensor) -> Model:
    return {"weight": flat[:48].view(6, 8).clone(), "bias": flat[48:].clone()}


def flat_of(model: Model) -> Tensor:
    return torch.cat([model["weight"].flatten(), model["bias"]])


def exact(generator: torch.Generator, size: int = J) -> Tensor:
    """Numbers whose sums are exact in float32, so that two ways to the same sum give the same bits."""
    return torch.randint(-512, 512, (size,), generator=generator) / 1024


class Federation:
    """Clients of a server, in one process: the same parts, without Flower in between."""

    def __init__(self, folder: Path, algorithm: Algorithm[Any], *, sparse_down: bool = True) -> None:
        self.folder, self.algorithm = folder, algorithm
        self.server = Server(sparse_down=sparse_down)
        self.generator = torch.Generator().manual_seed(0)
        self.model = model_of(exact(self.generator))
        self.round = 0
        self.node_of = {name: i for i, name in enumerate(SHARES)}

    def client(self, name: str) -> Client:
        """Made anew each time, as a process is: it has nothing but its disk."""
        return Client(self.algorithm, self.folder / f"{name}.pt", name=name)

    def ask(self, *names: str) -> dict[str, Instruction]:
        self.round += 1
        self.server.begin(self.round, self.model)
        return {name: self.server.instruction(self.node_of[name]) for name in names}

    def train(self, name: str, instruction: Instruction, update: Tensor) -> Reply:
        client = self.client(name)
        model = client.model_of(instruction)
        return client.reply(instruction, model, model_of(flat_of(model) - update))

    def end(self, *replies: Reply) -> dict[int, RegtopkError]:
        sent = {self.node_of[reply.client]: (reply, SHARES[reply.client]) for reply in replies}
        refused = self.server.finish(sent)
        self.model = self.server.model
        return refused

    def make_round(self, **updates: Tensor) -> list[Reply]:
        """Ask these clients, let them train, and end the round."""
        told = self.ask(*updates)
        replies = [self.train(name, told[name], update) for name, update in updates.items()]
        assert self.end(*reversed(replies)) == {}
        return replies

    def residual(self, name: str) -> Tensor:
        residual = self.client(name).residual
        return torch.zeros(J) if residual is None else residual


def sent_by(reply: Reply) -> Tensor:
    sparse = decode(reply.frame, J)
    return torch.zeros(J).scatter_(0, sparse.indices, sparse.values)


@pytest.mark.parametrize("sparse_down", [True, False])
@pytest.mark.parametrize("algorithm", [TopK(k=5), RegTopK(k=5), ChunkedTopK(density=0.1, chunk=16)])
def test_what_is_sent_and_what_is_kept_are_the_update_and_what_was_kept(
    tmp_path: Path, algorithm: Algorithm[Any], sparse_down: bool
) -> None:
    federation = Federation(tmp_path, algorithm, sparse_down=sparse_down)
    start, learned = flat_of(federation.model), torch.zeros(J)
    for sampled in ("ab", "b", "abc", "c", "a"):
        before = {name: federation.residual(name) for name in sampled}
        updates = {name: exact(federation.generator) for name in sampled}
        total = sum(SHARES[name] for name in sampled)
        for name, reply in zip(sampled, federation.make_round(**updates), strict=True):
            assert torch.equal(sent_by(reply) + federation.residual(name), before[name] + updates[name])
            learned += SHARES[name] / total * sent_by(reply)
    assert torch.allclose(flat_of(federation.model), start - learned, atol=1e-6)


def test_with_a_lossy_code_what_the_code_loses_is_kept(tmp_path: Path) -> None:
    federation = Federation(tmp_path, TopK(k=9, value_code="4bit"))
    update, start = torch.randn(J, generator=federation.generator), flat_of(federation.model)
    (reply,) = federation.make_round(a=update)
    rounded = start - (start - update)  # as training leaves it: the difference of two models in float32
    assert torch.equal(federation.residual("a"), rounded - sent_by(reply))
    assert (federation.residual("a")[sent_by(reply) != 0] != 0).any()


def test_what_the_server_did_not_get_goes_back_into_the_residual(tmp_path: Path) -> None:
    federation = Federation(tmp_path, TopK(k=5))
    first, second, third = (exact(federation.generator) for _ in range(3))
    federation.make_round(a=first)
    kept = federation.residual("a")
    federation.train("a", federation.ask("a")["a"], second)
    federation.end()  # its reply is lost
    (reply,) = federation.make_round(a=third)
    assert torch.equal(sent_by(reply) + federation.residual("a"), kept + second + third)


@pytest.mark.parametrize("algorithm", [TopK(k=1), RegTopK(k=1)])
def test_a_round_that_is_made_twice_counts_once(tmp_path: Path, algorithm: Algorithm[Any]) -> None:
    federation = Federation(tmp_path, algorithm)
    kept = torch.zeros(J)
    for _ in range(3):
        instruction = federation.ask("a")["a"]
        assert (instruction.missed is not None) == (federation.round > 1)
        federation.train("a", instruction, exact(federation.generator))  # killed before it had replied
        update = exact(federation.generator)
        reply = federation.train("a", instruction, update)
        assert torch.equal(sent_by(reply) + federation.residual("a"), kept + update)
        kept = federation.residual("a")
        assert federation.end(reply) == {}


@pytest.mark.parametrize(
    "algorithm",
    [RegTopK(k=30), RegTopK(k=30, reference="current"), ChunkedTopK(k=30, chunk=60, score=PosteriorScore())],
)
def test_all_clients_in_every_round_is_the_cluster_of_the_paper(
    tmp_path: Path, algorithm: Algorithm[Any]
) -> None:
    """RegTop-k as printed, bit for bit: the aggregate is the difference of two models."""
    federation = Federation(tmp_path, algorithm)
    cluster, plain = (
        Cluster(each, num_workers=3, weights=[w / 8 for w in SHARES.values()])
        for each in (algorithm, TopK(k=30))
    )
    flat = flat_of(federation.model)
    has_differed = False
    for _ in range(6):
        updates = torch.stack([exact(federation.generator) for _ in SHARES])
        federation.make_round(**dict(zip(SHARES, updates, strict=True)))
        aggregate = cluster.step(updates)
        flat = flat - aggregate
        has_differed |= not torch.equal(plain.step(updates), aggregate)
        assert torch.equal(flat_of(federation.model), flat)
    assert has_differed  # from Top-k: there was something to learn


@pytest.mark.parametrize("gap", [False, True])
def test_a_client_that_was_not_asked_last_selects_as_top_k_does(tmp_path: Path, gap: bool) -> None:
    federation = Federation(tmp_path, RegTopK(k=5, mu=1000.0))
    large = torch.zeros(J)
    large[:5] = 1.0
    federation.make_round(a=large, b=-3 * large)  # weight 3 against 1: they cancel
    if gap:
        federation.make_round(c=large / 4)
    (reply,) = federation.make_round(a=large + torch.arange(J) / 1024)
    assert (sent_by(reply).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]) == gap


def test_clients_with_an_older_model_are_sent_what_changed(tmp_path: Path) -> None:
    federation = Federation(tmp_path, TopK(k=1))
    for sampled in ("a", "b", "ab"):
        told = federation.ask(*sampled)
        for name, instruction in told.items():
            assert (instruction.missed is not None) == (federation.round == 3)
            model = federation.client(name).model_of(instruction)
            assert torch.equal(flat_of(model), flat_of(federation.model))
        federation.end(*(federation.train(name, told[name], UPDATE) for name in sampled))


def test_a_model_that_an_older_one_does_not_lead_to_is_sent_whole(tmp_path: Path) -> None:
    federation = Federation(tmp_path, TopK(k=1))
    federation.make_round(a=UPDATE)
    kept = unpack((tmp_path / "a.pt").read_bytes())
    kept["now"]["model"] += 1
    (tmp_path / "a.pt").write_bytes(pack(kept))
    text = "the older model of client 'a' must lead to that of round 2, got another checksum"
    assert refusal(lambda: federation.train("a", federation.ask("a")["a"], UPDATE)) == ("StateError", text)
    federation.end()
    federation.make_round(a=UPDATE)
    federation.model["bias"] += 1  # by the user
    assert federation.ask("a")["a"].missed is None


def test_a_bad_reply_is_refused_and_the_round_is_that_of_the_others(tmp_path: Path) -> None:
    federation = Federation(tmp_path, TopK(k=5))
    start = flat_of(federation.model)
    told = federation.ask(*SHARES)
    good, damaged, late = (federation.train(name, told[name], exact(federation.generator)) for name in SHARES)
    damaged.frame[40] ^= 1
    nodes = {0: (good, 3.0), 1: (damaged, 1.0), 2: (Reply("c", 7, late.frame), 4.0), 5: (good, 3.0)}
    refused = federation.server.finish(nodes)
    assert {node: f"{type(error).__name__}: {error}" for node, error in refused.items()} == {
        1: "WireFormatError: message is refused: checksum must be that of the words",
        2: "StateError: round of a reply must be 1, got 7",
        5: "StateError: clients must have names of their own, got 'a' twice",
    }
    assert torch.equal(flat_of(federation.server.model), start - sent_by(good))
    for weight in (0.0, -1.0, float("nan"), float("inf"), 1e308):
        text = f"weight of a reply must be above 0 and at most 9.0072e+15, got {weight}"
        assert refusal(partial(federation.server.check, good, weight)) == ("StateError", text)
    wide = encode(SparseGradient(torch.tensor([3]), torch.tensor([1e300], dtype=torch.float64), J))
    for frame in (good.frame.float(), good.frame[None], good.frame[:20], wide):
        refused_frame = refusal(partial(federation.server.check, Reply("a", 1, frame), 1.0))
    text = "values of a frame must be float32, as the model is, got torch.float64"
    assert refused_frame == ("StateError", text)


def test_a_round_that_would_make_the_model_infinite_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, TopK(k=1))
    frame = encode(SparseGradient(torch.tensor([7]), torch.tensor([-3e38]), J))
    federation.ask("a")
    assert federation.end(Reply("a", 1, frame)) == {}
    before = flat_of(federation.model)
    federation.ask("a")
    text = "model must stay finite, got NaN or inf in ['weight'] of round 2's replies"
    assert str(federation.end(Reply("a", 2, frame))[0]) == text
    assert torch.equal(flat_of(federation.model), before) and bool(before.isfinite().all())
    assert federation.ask("a")["a"].accepted["a"].token.startswith("1-")  # so the client takes it back


def test_a_round_that_would_make_a_statistic_infinite_is_refused() -> None:
    """Three finite ones, whose mean is rounded up to more than there is."""
    most = torch.finfo(torch.float16).max
    model = {"weight": torch.zeros(8), "norm.running_var": torch.ones(2, dtype=torch.float16)}
    frame = encode(SparseGradient(torch.tensor([7]), torch.tensor([1.0]), 8))
    server, whole = Server(), {"norm.running_var": torch.full((2,), most, dtype=torch.float16)}
    server.begin(1, model)
    refused = server.finish({node: (Reply(f"{node}", 1, frame, whole), 1.0) for node in range(3)})
    text = "model must stay finite, got NaN or inf in ['norm.running_var'] of round 1's replies"
    assert {node: str(reason) for node, reason in refused.items()} == dict.fromkeys(range(3), text)
    assert all(torch.equal(array, model[name]) for name, array in server.model.items())


def test_statistics_and_integers_travel_whole_and_arrays_keep_their_order(tmp_path: Path) -> None:
    model = {
        "norm.running_var": torch.ones(4),
        "weight": torch.zeros(800),
        "norm.num_batches_tracked": torch.tensor(0),
    }
    server = Server()
    server.begin(1, model)
    replies = {}
    for node, (name, share) in enumerate((("a", 3.0), ("b", 1.0))):
        client = Client(TopK(k=8), tmp_path / f"{name}.pt", name=name)
        told = server.instruction(node)
        trained = {key: array + (1 if array.dtype == torch.int64 else share) for key, array in model.items()}
        replies[node] = client.reply(told, client.model_of(told), trained), share
    assert server.finish(replies) == {}
    after = server.model
    assert list(after) == list(model)
    assert torch.equal(after["norm.running_var"], torch.full((4,), 3.5))
    assert torch.equal(after["weight"][:8], torch.full((8,), 2.5))
    assert after["norm.num_batches_tracked"] == 1
    server.begin(2, after)
    told = server.instruction(0)
    client, stranger = (Client(TopK(k=8), tmp_path / f"{name}.pt", name=name) for name in "ac")
    mine = client.model_of(told)
    assert told.missed is not None
    assert list(mine) == list(after)
    assert all(torch.equal(mine[name], after[name]) for name in after)
    frame = replies[0][0].frame
    spoiled = {**replies[0][0].whole, "norm.running_var": torch.tensor([1.0, torch.inf, 1.0, 1.0])}
    weight, longer = {"weight": mine["weight"]}, {**mine, "weight": torch.zeros(801)}
    refusals: dict[str, Callable[[], Any]] = {
        "StateError: arrays that travel whole must be {'norm.running_var': ((4,), torch.float32), "
        "'norm.num_batches_tracked': ((), torch.int64)}, "
        "got {}": lambda: server.check(Reply("a", 2, frame, {}), 1.0),
        "StateError: arrays that travel whole must be finite, got NaN or inf in "
        "['norm.running_var']": lambda: server.check(Reply("a", 2, frame, spoiled), 1.0),
        "GradientError: arrays of client 'a' must be finite, got NaN or inf in "
        "['norm.running_var']": lambda: client.reply(told, mine, {**mine, **spoiled}),
        "StateError: trained arrays must be ['norm.num_batches_tracked', 'norm.running_var', 'weight'], "
        "got ['weight']": lambda: client.reply(told, mine, weight),
        "StateError: array 'weight' must be float32 of shape (800,), got ((800,), torch.float64)": lambda: (
            client.reply(told, mine, {**mine, "weight": mine["weight"].double()})
        ),
        f"StateError: arrays must stay those in {tmp_path / 'a.pt'}, got other names or shapes": lambda: (
            client.reply(told, longer, longer)
        ),
        "StateError: client 'c' must have an older model to add rounds to, got none": lambda: (
            stranger.model_of(told)
        ),
        "StateError: model must have an array of float32 that is not skipped, got none": lambda: (
            Server().begin(1, {"n": torch.tensor(0)})
        ),
    }
    for text, act in refusals.items():
        assert ": ".join(refusal(act)) == text


def test_an_update_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, TopK(k=5))
    federation.make_round(a=UPDATE)
    before = (tmp_path / "a.pt").read_bytes()
    told = federation.ask("a")["a"]
    text = "arrays of client 'a' must be finite, got NaN or inf in what it trained"
    assert refusal(lambda: federation.train("a", told, UPDATE + torch.nan)) == ("GradientError", text)
    assert (tmp_path / "a.pt").read_bytes() == before
    assert list(tmp_path.iterdir()) == [tmp_path / "a.pt"]


def test_a_memory_of_another_server_client_or_algorithm_is_not_used(tmp_path: Path) -> None:
    first, second = Federation(tmp_path, TopK(k=5)), Federation(tmp_path, TopK(k=5))
    first.make_round(a=UPDATE)
    kept = first.residual("a")
    second.make_round(a=UPDATE)  # whose rounds have the same numbers: what the first accepted must not count
    assert torch.equal(second.residual("a"), kept)
    path = tmp_path / "a.pt"
    theirs = 1, "a", repr(TopK(k=5).options())
    for name, algorithm in (("b", TopK(k=5)), ("a", TopK(k=6))):
        client, mine = Client(algorithm, path, name=name), (1, name, repr(algorithm.options()))
        text = f"{path} must be of format, client and algorithm {mine}, got {theirs}"
        assert refusal(lambda: client.residual) == ("StateError", text)  # noqa: B023


def swap(place: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Put something else in a place of a memory; None removes what is there."""
    *path, last = place.split("/")

    def change(saved: dict[str, Any]) -> None:
        within: Any = reduce(dict.__getitem__, path, saved)
        within.pop(last)
        if value is not None:
            within[last] = value

    return change


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a NaN": (swap("now/state/residual", UPDATE + torch.nan), "residual of the memory now must be finite in"),
    "a shorter residual": (swap("now/state/residual", UPDATE[1:]), "now must hold {'residual': (60,)}"),
    "no residual": (swap("now/state/residual", None), "the memory now must hold {'residual': (60,)}"),
    "a model of inf": (swap("before/model", UPDATE / 0), "model of the memory before must be finite in"),
    "an index too large": (swap("now/sent/indices", torch.full((5,), J)), "in 0..59, got [60, "),
    "an index less": (swap("now/sent/indices", torch.arange(4)), "as many as values, 5, got 4"),
    "a round in words": (swap("now/sent/round", "two"), "a number and a word, got 'two'"),
    "a key less": (swap("now/sent/token", None), "KeyError('token')"),
    "no memory": (swap("now", None), "KeyError('now')"),
    "no server": (swap("server", None), "KeyError('server')"),
    "another name": (swap("names", ["weight"]), "names must be those of all arrays, got ['weight']"),
}


def test_a_damaged_memory_is_refused_by_name(tmp_path: Path) -> None:
    """With the right checksum."""
    federation, path = Federation(tmp_path, TopK(k=5)), tmp_path / "a.pt"
    for _ in range(2):
        federation.make_round(a=UPDATE)
    right = path.read_bytes()
    for damage, text in DAMAGES.values():
        saved = unpack(right)
        damage(saved)
        path.write_bytes(pack(saved))
        kind, said = refusal(lambda: federation.client("a").residual)
        assert kind == "StateError" and said.startswith(f"{path} must hold the memory of a client, got ")
        assert text in said, (text, said)
    path.write_bytes(right)
    federation.make_round(a=UPDATE)


def test_no_random_damage_of_a_memory_is_accepted(tmp_path: Path) -> None:
    """300 flipped bits and 100 cuts: torch alone reads most of the first without a word."""
    federation, path = Federation(tmp_path, RegTopK(k=5)), tmp_path / "a.pt"
    federation.make_round(a=UPDATE)
    right, draw = path.read_bytes(), random.Random(0)
    for number in range(400):
        damaged = bytearray(right)
        if number < 300:
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        else:
            del damaged[draw.randrange(len(damaged)) :]
        path.write_bytes(damaged)
        kind, said = refusal(lambda: federation.client("a").residual)
        assert kind == "StateError" and said.startswith(f"{path} must hold the memory of a client, got ")


ACCEPTED = "topk regtopk mipd-style chunked-topk strom dryden gradient-dropping adacomp hard-threshold sidco"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_which_algorithms_a_server_with_sampled_clients_can_run(name: str) -> None:
    with_density = hasattr(ALGORITHMS[name], "density")
    algorithm = ALGORITHMS[name](**({"density": 0.01} if with_density else {}))
    if name in ACCEPTED.split():
        check_algorithm(algorithm)
    else:
        kind, said = refusal(lambda: check_algorithm(algorithm))
        assert kind == "ArgumentError" and said.startswith("algorithm must ") and repr(name) in said


class HalfOfIt(TopK):
    """Top-k that does not apply the sum as it is."""

    def exchange(self, grad: Tensor, state: Any, worker: Any) -> Any:
        aggregate = yield from super().exchange(grad, state, worker)
        return aggregate / 2


class LearnsFromTheAnswer(TopK):
    def exchange(self, grad: Tensor, state: Any, worker: Any) -> Any:
        total = yield from super().exchange(grad, state, worker)
        state.residual += 0.5 * total
        return total


ONE_SUM = (
    "algorithm must need one sparse sum per round and apply it as it is, because a client hears of the "
    "others in the next round, got"
)
OWN = "algorithm must conserve each client's own update, because clients are sampled, got"
WHOLE = "algorithm must send one sparse vector of the whole model per round and need no answer in it, got"


def test_options_matter_to_what_can_be_run() -> None:
    refused: list[tuple[Algorithm[Any], str]] = [
        (HalfOfIt(k=1), ONE_SUM),
        (LearnsFromTheAnswer(k=1), ONE_SUM),
        (TopK(k=1, impute=0.5), OWN),
        (RegTopK(k=1, impute=1.0), OWN),
    ]
    for algorithm, rule in refused:
        text = f"{rule} {algorithm.name!r} with its options {algorithm.options()}"
        assert refusal(partial(check_algorithm, algorithm)) == ("ArgumentError", text)
    assert refusal(lambda: check_algorithm(Consensus(k=1)))[1] == f"{WHOLE} 'consensus' with its Gather"
    given: Any = TopK  # the class, not one
    assert refusal(lambda: check_algorithm(given))[1].startswith("algorithm must be an Algorithm such as ")
    check_algorithm(ChunkedTopK(density=0.1, chunk=16, score=PosteriorScore()))
    check_algorithm(TopK(k=1000))
