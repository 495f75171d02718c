"""Checkpoints of a run in a folder: whole or skipped, on as many ranks or others, on machines' own disks."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import regtopk
from regtopk.distributed.checkpoints.files import saves_in
from regtopk.errors import ArgumentError
from tests.distributed.ranks import Ranks, on_ranks
from tests.distributed.sharding import whole_parameters
from tests.distributed.test_fsdp_dcp import KINDS, Job
from tests.distributed.training import closing, ddp, listening, loss_of, made, make_net, refusal, same
from tests.processes import no_file_longer_than


class Run:
    """A model in training, and all that belongs to it."""

    def __init__(self, kind: str) -> None:
        self.net: nn.Module = make_net() if kind == "updates" else ddp()
        if kind == "updates":
            self.optimizer: Any = torch.optim.AdamW(self.net.parameters(), lr=0.01)
            topk = regtopk.TopK(density=0.05, value_code="4bit")
            self.exchange: Any = regtopk.UpdateExchange(self.net, self.optimizer, topk, every=2)
        else:
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)
            self.exchange = regtopk.attach(self.net, regtopk.RegTopK(density=0.05))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5])
        self.things = {"model": self.net, "optimizer": self.optimizer, "exchange": self.exchange}
        self.things["scheduler"] = self.scheduler

    def train(self, steps: range, checkpoints: regtopk.Checkpoints) -> None:
        """Train, and save after every second step."""
        for step in steps:
            self.optimizer.zero_grad()
            loss_of(self.net, step).backward()
            self.optimizer.step()
            self.scheduler.step()
            if step % 2 == 0:
                checkpoints.save(step, **self.things, seen=[step, dist.get_rank()])


class Ended(NamedTuple):
    """What a run has on a rank when it ends."""

    extra: Any  # what it loaded
    said: list[str]  # what was logged
    state: dict[str, Any]  # without times
    weighted: Tensor  # w_n e_n
    norm: float  # |e_n|
    lost: float


def start(
    kind: str, folder: Path, steps: int, keep: int = 2, own_disk: int | None = None, **options: Any
) -> Ended:
    """Start a run, which goes on from what it finds, makes some steps and ends."""
    run, rank = Run(kind), dist.get_rank()
    folder = folder if own_disk is None else disk(folder, own_disk)
    with listening() as said, closing(run.exchange):
        with regtopk.Checkpoints(folder, keep=keep, **options) as checkpoints:
            extra = checkpoints.load(**run.things)
            first = 1 if extra is None else extra["step"] + 1
            run.train(range(first, first + steps), checkpoints)
        exchange, total = run.exchange.state_dict(), run.exchange.total
        for worker in exchange["workers"].values():
            worker["total"] = {key: n for key, n in worker["total"].items() if not key.endswith("_s")}
        entries = exchange["workers"][str(rank)]["entries"].values()
        residual = torch.cat([parts["residual"].flatten() for parts in entries]).double()
        state = {name: thing.state_dict() for name, thing in run.things.items()} | {"exchange": exchange}
        weighted = run.exchange.weights[rank] * residual
        return Ended(extra, list(said), state, weighted, total.residual_norm, total.lost_residual)


def disk(folder: Path, turn: int = 0) -> Path:
    """A rank's own disk."""
    return folder / f"disk-{(dist.get_rank() + turn) % dist.get_world_size()}"


def steps_in(folder: Path) -> list[int]:
    return [save.step for save in saves_in(folder)]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["gradients", "updates"])
def test_a_run_goes_on_bit_for_bit(two_ranks: Ranks, tmp_path: Path, kind: str, asynchronous: bool) -> None:
    begin = partial(start, asynchronous=asynchronous)
    whole = two_ranks.run(begin, kind, tmp_path / "whole", 9)
    assert all(ended.extra is None for ended in two_ranks.run(begin, kind, tmp_path / "run", 6))
    assert steps_in(tmp_path / "run") == [4, 6]
    for rank, again in enumerate(two_ranks.run(begin, kind, tmp_path / "run", 3)):
        assert again.extra == {"step": 6, "seen": [6, rank]}
        assert same(again.state, whole[rank].state)
    assert steps_in(tmp_path / "run") == [6, 8]


@pytest.mark.parametrize("kind", ["gradients", "updates"])
def test_other_numbers_of_ranks(four_ranks: Ranks, two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    saved = four_ranks.run(start, kind, tmp_path, 4)
    loaded = two_ranks.run(start, kind, tmp_path, 0)
    expected = sum(ended.weighted for ended in saved)
    total = sum(ended.weighted for ended in loaded)
    assert expected.abs().max() > 0
    assert torch.allclose(total, expected, rtol=0, atol=2.0**-22 * float(expected.abs().max()))
    for rank, ended in enumerate(loaded):
        assert ended.extra == {"step": 4, "seen": [4, rank]} and ended.lost == 0
        assert same(ended.state["model"], loaded[0].state["model"])
        told = ["exchange of 4 ranks is taken over by 2: no residual is lost"]
        assert ended.said == (told if rank == 0 else [])


def reseal(manifest: Path, **facts: Any) -> None:
    """Change facts of a manifest (None: leave them out), with the checksum that then is right."""
    found = json.loads(manifest.read_text()) | facts
    found = {name: fact for name, fact in found.items() if fact is not None and name != "checksum"}
    checksum = crc32(json.dumps(found).encode())
    manifest.write_text(json.dumps({**found, "checksum": checksum}))


SEALED: dict[str, dict[str, Any]] = {
    "ranks in words": {"num_ranks": "two"},
    "many ranks": {"num_ranks": 10**12},
    "no weights": {"weights": None},
    "other weights": {"weights": {"exchange": [0.25, 0.75]}},
    "another file": {"files": {"../rank-1.pt": [1, 2], "rank-0.pt": [1, 2]}},
    "another rank": {"rank": 1},
    "another step": {"step": 3},
    "other format": {"format": 2},
    "format in words": {"format": "two"},
}


def damage(save: Path, how: str) -> None:
    part, manifest = save / "rank-1.pt", save / "rank-0.json"
    text = manifest.read_text()
    texts = {
        "manifest": "{",
        "nested": "[" * 100_000,
        "another fact": text.replace('"num_ranks": 2', '"num_ranks": 3'),
    }
    if how in texts:
        manifest.write_text(texts[how])
    elif how in SEALED:
        reseal(manifest, **SEALED[how])
    elif how == "flipped":
        content = bytearray(part.read_bytes())
        content[len(content) // 2] ^= 1
        part.write_bytes(content)
    elif how == "cut":
        os.truncate(part, 100)
    else:
        gone = {"unfinished": "rank-1.json", "no shared": "shared-0.pt", "empty": "*"}[how]
        for path in save.glob(gone):
            path.unlink()


HOW = {
    "flipped": "a file has a wrong checksum",
    "cut": "rank-1.pt is missing or cut off",
    "no shared": "shared-0.pt is missing or cut off",
    "manifest": "rank-0.json is damaged",
    "nested": "rank-0.json is damaged",
    "another fact": "rank-0.json is damaged",
    "ranks in words": "rank-0.json is damaged",
    "many ranks": "rank-0.json is damaged",
    "no weights": "rank-0.json is damaged",
    "other weights": "the manifests of ranks [0, 1] differ in weights",
    "another file": "rank-0.json is damaged",
    "another rank": "rank-0.json is damaged",
    "another step": "rank-0.json is of another save: of rank 0 at step 3 of run ",
    "unfinished": "parts of ranks [1] are missing",
    "empty": "no rank has finished its part",
}
ADVICE = "Use the regtopk that saved them, mend them, or move them to another folder to go on without them"
OTHER_FORMAT = "rank-0.json is of format {}, this version of regtopk reads 1"


@pytest.fixture(scope="module")
def saved(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the saves of steps 2 and 4, of two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    two_ranks.run(start, "gradients", folder, 4)
    return folder


def contents_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.glob("step-*/*")}


def test_parts_of_another_save_are_refused_by_name(two_ranks: Ranks, tmp_path: Path, saved: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    older, newer = sorted(folder.iterdir())
    for path in older.glob("rank-1.*"):
        shutil.copy(path, newer)
    here, _ = two_ranks.run(start, "gradients", folder, 0)
    run = older.name.rpartition("-")[2]
    reason = f"rank-1.json is of another save: of rank 1 at step 2 of run {run}"
    assert here.extra["step"] == 2
    assert here.said == [f"checkpoint of step 4 is skipped ({newer.name}): {reason}"]


def load_refused(folder: Path) -> tuple[str, str]:
    with made(Run, "updates") as (_, exchange), regtopk.Checkpoints(folder) as checkpoints:
        return refusal(lambda: checkpoints.load(exchange=exchange))


def test_ranks_that_begin_from_different_models_are_refused_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    """Rank 1 has another theta_start, with the checksums that then are right."""
    two_ranks.run(start, "updates", tmp_path, 2)
    (save,) = tmp_path.iterdir()
    part = torch.load(save / "rank-1.pt", weights_only=True)
    part["exchange"]["updates"]["start"]["last.bias"] += 1
    torch.save(part, save / "rank-1.pt")
    content = (save / "rank-1.pt").read_bytes()
    reseal(save / "rank-1.json", files={"rank-1.pt": [len(content), crc32(content)]})
    for kind, text in two_ranks.run(load_refused, tmp_path):
        assert kind == "StateError" and "one moment of one run, with the same theta_start" in text


@pytest.mark.parametrize("how", HOW)
def test_a_save_that_is_not_whole_is_skipped(two_ranks: Ranks, tmp_path: Path, saved: Path, how: str) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    newest = folder / max(saves_in(folder)).folder
    damage(newest, how)
    before = contents_of(newest.parent)
    here, elsewhere = two_ranks.run(start, "gradients", folder, 6, 1)
    assert [here.extra["seen"], elsewhere.extra["seen"]] == [[2, 0], [2, 1]]
    (told,) = here.said
    assert told.startswith(f"checkpoint of step 4 is skipped ({newest.name}): {HOW[how]}")
    was_complete = how not in ("unfinished", "empty")
    assert newest.exists() == was_complete  # a run removes nothing that it could not use
    if was_complete:
        assert contents_of(folder).items() >= {p: c for p, c in before.items() if newest.name in p}.items()
    assert steps_in(folder) == ([4, 8] if was_complete else [8])


def stop(folder: Path) -> list[tuple[str, str]]:
    with made(Run, "gradients") as (run, _), regtopk.Checkpoints(folder) as checkpoints:
        load, save = lambda: checkpoints.load(**run.things), lambda: checkpoints.save(1, own=1)
        return [refusal(load), refusal(save)]


STOPS = [how for how in HOW if how not in ("empty", *SEALED)] + ["other format", "only the newest", "renamed"]


@pytest.mark.parametrize("how", STOPS)
def test_saves_that_cannot_be_used_stop_a_run(
    two_ranks: Ranks, tmp_path: Path, saved: Path, how: str
) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    saves = sorted(folder.iterdir())
    for save in saves if how != "only the newest" else saves[-1:]:
        if how == "renamed":
            save.rename(folder / save.name.replace("step-", "step-1"))
        else:
            damage(save, "format in words" if how == "only the newest" else how)
    before = contents_of(folder)
    for (kind, text), (save_kind, _) in two_ranks.run(stop, folder):
        assert kind == "StateError" and save_kind == "ArgumentError"
        assert text.startswith(f"checkpoints in {folder} cannot be used: step-")
        found = "'two'" if how == "only the newest" else 2
        reason = "rank-0.json is of another save: of rank 0 at step 2 of run" if how == "renamed" else ""
        assert (reason or HOW.get(how, OTHER_FORMAT.format(found))) in text
        assert text.endswith(f". None was changed. {ADVICE}")
    assert contents_of(folder) == before


def test_a_first_save_that_was_never_complete_stops_nobody(
    two_ranks: Ranks, tmp_path: Path, saved: Path
) -> None:
    """A launcher restarts ranks that were killed in their first save, once or twice."""
    folder = shutil.copytree(saved, tmp_path / "run")
    first, second = sorted(folder.iterdir())
    for save in (first, second.rename(folder / "step-0000000002-00000000")):
        reseal(save / "rank-0.json", step=2, run=save.name.rpartition("-")[2])
        damage(save, "unfinished")
    here, elsewhere = two_ranks.run(start, "gradients", folder, 6, 1)
    assert here.extra is None and elsewhere.extra is None and len(here.said) == 2
    assert steps_in(folder) == [6]


@pytest.mark.parametrize("kind", ["gradients", "updates"])
def test_own_disks_and_one_that_is_lost(two_ranks: Ranks, tmp_path: Path, kind: str) -> None:
    saved = two_ranks.run(partial(start, own_disk=0), kind, tmp_path, 4)
    for turn in (0, 1):  # ranks that come back on each other's machines are sent their parts
        for rank, ended in enumerate(two_ranks.run(partial(start, own_disk=turn), kind, tmp_path, 0)):
            assert ended.extra["seen"] == [4, rank] and ended.lost == 0
            assert torch.equal(ended.weighted, saved[rank].weighted)
            assert len(ended.said) == (1 + turn if rank == 0 else 0)
    shutil.rmtree(tmp_path / "disk-1")
    here, elsewhere = two_ranks.run(partial(start, own_disk=0), kind, tmp_path, 0)
    kept = saved[0].weighted
    assert torch.allclose(here.weighted + elsewhere.weighted, kept, rtol=0, atol=1e-7)
    assert kept.abs().max() > 1e-4
    norm = 0.5 * saved[1].norm
    share = 100 * saved[1].norm / (saved[0].norm + saved[1].norm)
    assert here.lost == elsewhere.lost == pytest.approx(norm)
    assert here.said[-1] == (
        "exchange goes on without the parts of ranks [1]: the weighted norms of what they had not sent add "
        f"up to {norm:.4g}, {share:.1f} % of those of all ranks"
    )
    assert same(here.state["model"], elsewhere.state["model"])


def full_disk(rank: int) -> AbstractContextManager[None]:
    """No file of this rank may grow beyond a few bytes."""
    return no_file_longer_than(2000) if dist.get_rank() == rank else nullcontext()


def fill_the_disk(folder: Path, on_error: Any, asynchronous: bool) -> tuple[Any, ...]:
    checkpoints = regtopk.Checkpoints(folder, on_error=on_error, asynchronous=asynchronous)

    def save(step: int) -> None:
        checkpoints.save(step, net=make_net(), own=torch.zeros(1000))
        checkpoints.wait()

    with listening() as said:
        save(2)
        with full_disk(1):
            refused = None
            if on_error == "raise":
                refused = refusal(lambda: save(4))
            else:
                save(4)
        dist.barrier()
        steps = steps_in(folder)
        save(6)
        checkpoints.close()
        dist.barrier()
        return refused, said, steps, steps_in(folder)


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_a_full_disk(tmp_path: Path, asynchronous: bool) -> None:
    error = "rank 1: OSError: [Errno 27] File too large"
    message = f"checkpoint of step 4 was not written ({error}); the last one is of step 2"
    warned, refused = (fill_the_disk(tmp_path / how, how, asynchronous) for how in ("warn", "raise"))
    assert warned == (None, [f"{message}; training goes on"], [2], [2, 6])
    assert refused == (("OutputError", message), [], [2], [2, 6])


class Unwilling:
    """A thing that the last rank cannot save."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ArgumentError("not now")
        return {}


def fail_in_a_subgroup(folder: Path) -> list[str]:
    """What ranks 1 and 3 are told, when these two save and load without the others, and rank 3 cannot."""
    rank, net, other = dist.get_rank(), make_net(), nn.Linear(3, 3)
    group = dist.new_group([1, 3])
    if rank not in (1, 3):
        return []
    blocked = folder / f"of-{rank}" / "run"
    if rank == 3:
        blocked.parent.write_text("a file, not a folder")
    with (
        regtopk.Checkpoints(folder / "run", process_group=group, on_error="raise") as checkpoints,
        regtopk.Checkpoints(blocked, process_group=group) as without_folder,
        regtopk.Checkpoints(disk(folder), process_group=group) as on_own_disks,
        listening() as said,
    ):
        refused = [
            refusal(without_folder.load),
            refusal(lambda: checkpoints.save(1, thing=Unwilling())),
            refusal(lambda: checkpoints.save(rank, net=net)),
        ]
        assert list(saves_in(folder / "run")) == []  # what one rank cannot save is saved by none
        checkpoints.save(1, net=net)
        net.first.weight.data.fill_(7.0)
        refused.append(refusal(lambda: checkpoints.load(net=net if rank == 1 else other)))
        assert bool((net.first.weight == 7.0).all())
        with full_disk(3):
            refused.append(refusal(lambda: checkpoints.save(2, own=torch.zeros(1000))))
        on_own_disks.load()
        return [f"{kind}: {text}" for kind, text in refused] + said


SUBGROUP = [
    "OutputError: rank 3 cannot write to folder /",
    "ClusterError: rank 3 cannot save: ArgumentError: not now",
    "ClusterError: all ranks must save the same things at the same step, got ['net'] at step 1 on rank 1",
    "StateError: rank 3 cannot load the checkpoint: StateError: net of the checkpoint must be this model's",
    "OutputError: checkpoint of step 2 was not written (rank 3: OSError: [Errno 27] File too large)",
]


def test_what_one_rank_cannot_do_no_rank_does_and_ranks_are_told_as_users_know_them(
    four_ranks: Ranks, tmp_path: Path
) -> None:
    _, told, _, of_rank_3 = four_ranks.run(fail_in_a_subgroup, tmp_path)
    for text, beginning in zip(told, SUBGROUP, strict=False):
        assert text.startswith(beginning)
    assert told[2].endswith("['net'] at step 3 on rank 3") and "seen by ranks [[1], [3]]" in told[5]
    assert of_rank_3[1] == "ArgumentError: not now" and of_rank_3[3] in told[3]


@on_ranks(2)
def test_close_tells_what_was_not_written(tmp_path: Path) -> None:
    with listening() as said, full_disk(1):
        checkpoints = regtopk.Checkpoints(tmp_path / "run", asynchronous=True)
        checkpoints.save(1, net=make_net(), own=torch.zeros(1000))
        checkpoints.close()
    text = "checkpoint of step 1 was not written: OSError(27, 'File too large')"
    assert said == [[], [text]][dist.get_rank()]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(4)
def test_a_sharded_model_goes_on_on_its_mesh(tmp_path: Path, kind: str) -> None:
    jobs = [Job(kind, shape) for shape in ((2, 2), (2, 2), (1, 4))]
    things: list[dict[str, Any]] = [{"exchange": job.exchange} for job in jobs]
    for job, each in zip(jobs, things, strict=True):
        if kind == "attach":
            job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01)
            each |= {"model": job.model, "optimizer": job.optimizer}
    job, again, other = jobs
    job.train(range(3))
    with regtopk.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(3, **things[0])
    with regtopk.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.load(**things[1]) == {"step": 3}
    for each_job in (job, again):
        each_job.train(range(3, 5))
    assert torch.equal(whole_parameters(again.model), whole_parameters(job.model))
    before, rank = whole_parameters(other.model), dist.get_rank()
    error, text = refusal(lambda: regtopk.Checkpoints(tmp_path).load(**things[2]))
    assert torch.equal(whole_parameters(other.model), before)
    part = f"the saved state must hold part {rank} of 4, got parts ['{rank % 2} of 2']"
    start = f"model must be loaded on the mesh of its shards, [[{[rank - rank % 2, rank - rank % 2 + 1]}, "
    end = " of 4: torch.distributed.checkpoint (DCP) can change the mesh"
    is_right = text == part if kind == "updates" else text.startswith(start) and text.endswith(end)
    assert error == "StateError" and is_right, text


@on_ranks(2)
def test_refusals(tmp_path: Path) -> None:
    """What is refused leaves the folder and the run as they were."""
    run, checkpoints = Run("gradients"), regtopk.Checkpoints(tmp_path)
    checkpoints.save(2, exchange=run.exchange, model=run.net, optimizer=run.optimizer)
    (newest,) = checkpoints.folder.iterdir()
    groups = [dist.new_group([rank]) for rank in range(2)]
    alone = regtopk.Exchange(nn.Linear(2, 2), regtopk.Dense(), process_group=groups[dist.get_rank()])
    other: Any = regtopk.Checkpoints  # with arguments that are not right
    old_run = "ArgumentError: folder must be empty, or be loaded before a save"
    acts: dict[str, Callable[[], Any]] = {
        "ArgumentError: step must be greater than the last one, 2, got 2": lambda: checkpoints.save(2, own=1),
        "ArgumentError: step must be an integer of at least 0, got -1": lambda: checkpoints.save(-1, own=1),
        "ArgumentError: own must hold numbers, strings, tensors, dicts and lists alone, or have "
        "state_dict(), so that torch.load(weights_only=True) can read it, "
        "got object": lambda: checkpoints.save(3, own=object()),
        "ArgumentError: alone must be an exchange over the 2 ranks of process_group, got 1": lambda: (
            checkpoints.save(3, alone=alone)
        ),
        "ArgumentError: own must have load_state_dict(), got int": lambda: checkpoints.load(own=3),
        "StateError: the checkpoint must hold ['net'], got ['exchange', 'model', 'optimizer']": lambda: (
            checkpoints.load(net=run.net)
        ),
        "StateError: optimizer of the checkpoint must have groups of [2] parameters, got [8]": lambda: (
            checkpoints.load(optimizer=torch.optim.SGD(nn.Linear(3, 3).parameters()))
        ),
        "StateError: model of the checkpoint must be this model's: 'weight' is (3, 3), got nothing": lambda: (
            checkpoints.load(model=nn.Linear(3, 3))
        ),
        f"{old_run}, got {newest}": lambda: other(tmp_path).save(3, own=1),
        "ArgumentError: keep must be an integer of at least 1, got 0": lambda: other(tmp_path, keep=0),
        "ArgumentError: on_error must be one of warn, raise, got 'i'": lambda: other(tmp_path, on_error="i"),
    }
    for text, act in acts.items():
        assert ": ".join(refusal(act)) == text
    checkpoints.close()
    run.exchange.close()
    assert refusal(checkpoints.load) == ("ArgumentError", "checkpoints must not be used after close()")


def test_one_process_without_a_group(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with regtopk.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(1, model=net, epoch=3)
    other = nn.Linear(2, 2)
    with regtopk.Checkpoints(tmp_path / "run") as checkpoints:
        assert checkpoints.load(model=other) == {"step": 1, "epoch": 3}
    assert torch.equal(other.weight, net.weight)
