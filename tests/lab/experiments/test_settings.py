import pytest
import torch

from regtopk.errors import ArgumentError
from regtopk.lab.experiments import EXPERIMENTS, parse_settings
from regtopk.lab.experiments.paper.fig2 import Fig2Config
from regtopk.lab.experiments.settings import SMALL, check_device, format_seeds, parse_seeds, threads_for


def test_values_take_the_type_of_the_default() -> None:
    config = parse_settings(Fig2Config, ["num_iterations=3", "lr=1e-3", "densities=0.25,1", "device=cpu"])
    assert config == Fig2Config(num_iterations=3, lr=0.001, densities=(0.25, 1.0), device="cpu")
    assert parse_settings(Fig2Config, []) == Fig2Config()


@pytest.mark.parametrize(
    ("experiment", "settings", "message"),
    [
        ("fig2", "lr", "setting must be key=value, got 'lr'"),
        ("fig2", "num_worker=3", r"got 'num_worker' \(did you mean 'num_workers'\?\)"),
        ("fig2", "lr=1 lr=2", "each setting must be given once, got lr twice"),
        ("fig2", "num_workers=two", r"num_workers must be like its default, 20, got 'two'"),
        ("fig2", "densities=0.4;0.5", "densities .* got '0.4;0.5'"),
        ("fig3", "deterministic=maybe", "deterministic .* got 'maybe'"),
        ("fig2", "num_iterations=-1", "num_iterations .* got -1"),
        ("fig2", "lr=nan", "lr .* got nan"),
        ("fig2", "mu=0", "mu .* got 0.0"),
        ("fig2", "densities=0.4,1.5", "density .* got 1.5"),
        ("fig2", "densities=0.4,0.4", r"densities must be different and at least one, got \(0.4, 0.4\)"),
        ("fig2", "device=tpu", "device must be cpu or cuda, got 'tpu'"),
        ("fig2", "seeds=5-3", "seeds must be a number, or different ones like 3,4,5 or 2-6, got '5-3'"),
        ("scaling", "slope=nan", "slope .* got nan"),
        ("scaling", "curvature=-1", "curvature .* got -1.0"),
    ],
)
def test_bad_settings_are_refused(experiment: str, settings: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        parse_settings(EXPERIMENTS[experiment].config, settings.split())


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("3", [0, 1, 2]), ("3,4,5", [3, 4, 5]), ("2-6", [2, 3, 4, 5, 6]), ("3-3", [3]), ("3,", [3])],
)
def test_seeds_are_a_number_or_a_list(text: str, seeds: list[int]) -> None:
    assert parse_seeds(text) == seeds and parse_seeds(format_seeds(seeds)) == seeds


@pytest.mark.parametrize("text", ["", "0", "x", "3,3", "6-2", "-1", "1,-2"])
def test_other_seeds_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="seeds"):
        parse_seeds(text)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="device must be cpu where torch finds no GPU, got 'cuda'"):
        check_device("device", "cuda")


def test_small_models_have_one_thread_and_the_number_is_given_back() -> None:
    torch.set_num_threads(2)
    with threads_for(SMALL):
        assert torch.get_num_threads() == 2
    with pytest.raises(ValueError, match="x"), threads_for(SMALL - 1):
        assert torch.get_num_threads() == 1
        raise ValueError("x")
    assert torch.get_num_threads() == 2
