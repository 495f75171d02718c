"""What docs/why.md counts and draws."""

from pathlib import Path

import pytest
import torch

from regtopk.algorithms import RegTopK
from regtopk.lab.experiments.compare.config import CompareConfig
from regtopk.lab.experiments.paper.fig2 import Fig2Config
from regtopk.lab.experiments.paper.fig3 import PRESETS
from regtopk.lab.experiments.tasks.regression import Regressions, draw_regressions
from tools.why import Jump, Step, count_senders, draw_consensus, draw_score, jumps_of, watch

SMALL = Fig2Config(seeds="2", num_iterations=30, num_workers=5, numel=12, num_points=30, lr=0.05)


@pytest.fixture(scope="module")
def problems() -> Regressions:
    return draw_regressions(SMALL)


def test_at_full_density_all_send_everything_and_both_guesses_come_true(problems: Regressions) -> None:
    seen = watch(SMALL, problems, RegTopK(density=1.0))
    assert seen.num_by_all == [[12, 12]] * 30 and seen.num_by_some == [[0, 0]] * 30
    assert len(seen.distance) == 30 and seen.distance[-1][0] < 0.5 * seen.distance[0][0]
    # Nothing waits, so z changes by the step's share alone, and both models of it are nearly right.
    assert len(seen.error) == 29 and max(seen.error[-1].values()) < 0.1
    assert seen.jumps == []


def test_an_entry_is_sent_by_all_by_some_or_by_none(problems: Regressions) -> None:
    seen = watch(SMALL, problems, RegTopK(density=0.5))
    for by_all, by_some in zip(seen.num_by_all, seen.num_by_some, strict=True):
        for seed in range(2):
            left = SMALL.num_workers * (6 - by_all[seed])  # messages beside those that all sent
            assert by_some[seed] <= left <= (SMALL.num_workers - 1) * by_some[seed]


def test_a_jump_names_the_entries_that_parted_the_workers() -> None:
    # Two workers, three entries. Entry 0 was sent with two gradients in it, entries 1 and 2 with one.
    last = Step(
        own=torch.tensor([[[2.0, 1.0, 3.0], [-2.0, -1.0, -3.0]]]),
        aggregate=torch.tensor([[[0.5, -0.25, 0.125]]]),
        is_sent=torch.ones(1, 2, 3, dtype=torch.bool),
    )
    step = Step(
        own=torch.tensor([[[1.0, 1.0, 3.0], [-1.0, -1.0, -3.0]]]),
        aggregate=torch.tensor([[[1.0, -1.0, 0.0]]]),
        is_sent=torch.tensor([[[True, False, True], [False, True, True]]]),
    )
    assert list(jumps_of([[1e-3], [2e-2]], step, last)) == [Jump(0, 2, 1e-3, 2e-2, [1, 1], [0.25, 0.25])]
    assert list(jumps_of([[1e-3], [9e-3]], step, last)) == []


def test_shares_of_a_deep_network_add_up() -> None:
    settings = {**PRESETS["smoke"], "num_steps": 2}
    shares = count_senders(CompareConfig(**settings), mu=1.0)
    assert len(shares) == 4 and sum(shares) == pytest.approx(1)
    assert 0 < shares[0] < 1
    assert count_senders(CompareConfig(**{**settings, "densities": (1.0,)}), mu=1.0) == [0, 0, 0, 1]


def test_the_pictures_are_drawn(problems: Regressions, tmp_path: Path) -> None:
    draw_score(tmp_path / "score.png")
    draw_consensus(watch(SMALL, problems, RegTopK(density=0.5)), tmp_path / "consensus.png")
    for name in ("score.png", "consensus.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
