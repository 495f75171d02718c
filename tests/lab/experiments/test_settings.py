import pytest

from regtopk.errors import ArgumentError
from regtopk.lab.experiments import EXPERIMENTS, parse_settings
from regtopk.lab.experiments.paper.fig2 import Fig2Config
from regtopk.lab.experiments.settings import format_seeds, parse_seeds


def test_values_take_the_type_of_the_default() -> None:
    config = parse_settings(Fig2Config, ["num_seeds=3", "lr=1e-3", "densities=0.25,1", "device=cpu"])
    assert config == Fig2Config(num_seeds=3, lr=0.001, densities=(0.25, 1.0), device="cpu")


def test_no_settings_are_the_defaults() -> None:
    assert parse_settings(Fig2Config, []) == Fig2Config()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("lr", "setting must be key=value, got 'lr'"),
        ("num_seed=3", r"got 'num_seed' \(did you mean 'num_seeds'\?\)"),
        ("foo=1", r"setting must be one of num_seeds, .*, got 'foo'$"),
        ("num_seeds=two", r"num_seeds must be of type int \(default 1\), got 'two'"),
        ("lr=fast", r"lr must be of type float \(default 0.01\), got 'fast'"),
        ("densities=0.4;0.5", r"densities must be numbers with commas \(default .*\), got '0.4;0.5'"),
        ("num_seeds=0", "num_seeds must be an integer of at least 1, got 0"),
        ("num_iterations=-1", "num_iterations must be an integer of at least 1, got -1"),
        ("lr=nan", "lr must be positive and finite, got nan"),
        ("mu=0", "mu must be positive and finite, got 0.0"),
        ("noise_variance=inf", "noise_variance must be positive and finite, got inf"),
        ("mean=inf", "mean must be finite, got inf"),
        ("densities=0.4,1.5", r"density must be in \(0, 1\], got 1.5"),
        ("densities=0.4,0.4", r"densities must be different and at least one, got \(0.4, 0.4\)"),
        ("device=tpu", "device must be cpu or cuda, got 'tpu'"),
    ],
)
def test_bad_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(Fig2Config, [setting])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("slope=nan", "slope must be finite, got nan"),
        ("curvature=-1", "curvature must be >= 0 and finite, got -1.0"),
    ],
)
def test_bad_settings_of_scaling(setting: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(EXPERIMENTS["scaling"].config, [setting])


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(ArgumentError, match="each setting must be given once, got lr twice"):
        parse_settings(Fig2Config, ["lr=1", "lr=2"])


def test_cuda_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ArgumentError, match="device must be cpu where torch finds no GPU, got 'cuda'"):
        parse_settings(Fig2Config, ["device=cuda"])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_table_of_experiments(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert experiment.name == name
    assert experiment.title and experiment.about
    assert experiment.panels(experiment.config())


def test_seeds_are_a_number_a_list_or_a_range() -> None:
    for text, seeds in {"3": [0, 1, 2], "4,2": [4, 2], "3,": [3], "3-3": [3], "2-6": [2, 3, 4, 5, 6]}.items():
        assert parse_seeds(text) == seeds == parse_seeds(format_seeds(seeds))
    for text in ("two", "1,1", "0", "3-2", "-1"):
        with pytest.raises(ArgumentError, match=f"seeds must be a number of them, .* got '{text}'"):
            parse_seeds(text)
