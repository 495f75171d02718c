"""The experiment with adaptive densities, in small."""

import pytest

from regtopk.errors import ArgumentError
from regtopk.lab.experiments import EXPERIMENTS, parse_settings
from regtopk.lab.experiments.experiment import silent
from regtopk.lab.experiments.paper.adaptive import ADAPTIVE, AdaptiveConfig


def test_densities_move_towards_their_aims() -> None:
    config = AdaptiveConfig(num_steps=18, num_records=3, num_seeds=2, every=2, split="iid")
    records = list(ADAPTIVE.run(config, silent))
    summary = ADAPTIVE.summarise(config, records)
    assert [record["step"] for record in records] == [6, 12, 18] * 4
    fixed, bytes_, above, below = (records[3 * i : 3 * i + 3] for i in range(4))
    assert all(record["density"] == [0.01, 0.01] for record in fixed)
    size = fixed[-1]["payload_bytes"] / 18
    assert bytes_[0]["method"] == f"{size:.0f} bytes a step"
    for seed in range(2):
        assert 0.1 > bytes_[0]["density"][seed] > bytes_[2]["density"][seed] > 0.001
        assert all(0.1 > record["density"][seed] > 0.01 for record in above)
        assert 0.001 < below[0]["density"][seed] < below[2]["density"][seed]
        assert all(0 < record["error"][seed] < 1 for record in records)
        assert abs(above[2]["error"][seed] - 0.9) < abs(above[0]["error"][seed] - 0.9)
    assert set(summary["results"]) == {record["method"] for record in records}
    assert summary["results"]["density 0.01"]["bytes a step"] == size
    assert [row["measure"] for row in summary["table"]][:2] == ["density, second half", "error, second half"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("density=0.2", r"density must be in \(0, 0\.1\], got 0\.2"),
        ("target_error=1", r"target_error must be in \(0, 1\), got 1\.0"),
        ("every=0", "every must be an integer of at least 1, got 0"),
        ("lr=-1", "lr must be positive and finite, got -1.0"),
        ("split=odd", "split must be .*, got 'odd'"),
    ],
)
def test_bad_settings(setting: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(EXPERIMENTS["adaptive"].config, [setting])
