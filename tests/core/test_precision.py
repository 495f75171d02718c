"""Rounding at random, for residuals in bfloat16."""

import pytest
import torch

from regtopk.core.precision import round_at_random


def test_a_number_becomes_one_of_its_neighbours_and_itself_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(2000, generator=generator) * torch.logspace(-6, 6, 2000)
    rounded = torch.stack([round_at_random(vector, torch.tensor(1), step) for step in range(2000)]).double()
    assert ((rounded - vector).abs() <= 2.0**-7 * vector.abs()).all()
    standard_error = 2.0**-8 * vector.abs() / 2000**0.5  # at most: half the distance of the neighbours
    off = (rounded.mean(0) - vector) / standard_error
    assert off.abs().max() < 5 and abs(off.mean()) < 4 / 2000**0.5


def test_what_bfloat16_holds_stays_as_it_is() -> None:
    vector = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-126, 3.0e38]).bfloat16().float()
    assert torch.equal(round_at_random(vector, torch.tensor(0), 3).float(), vector)


def test_workers_draw_apart_and_the_same_batched_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vector = torch.full((3, 10_001), 1 + 2.0**-9)
    batched = round_at_random(vector, torch.arange(3).unsqueeze(-1), 7)
    alone = [round_at_random(row, torch.tensor(n), 7) for n, row in enumerate(vector)]
    assert torch.equal(batched, torch.stack(alone)) and not torch.equal(alone[0], alone[1])
    monkeypatch.setattr("regtopk.core.precision._PIECE", 1 << 10)
    assert torch.equal(round_at_random(vector[1], torch.tensor(1), 7), alone[1])  # piece by piece
