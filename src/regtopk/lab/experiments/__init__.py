"""Experiments: the paper's figures, comparisons of methods, and training by real processes."""

from typing import Any

from regtopk.lab.experiments.compare.comparison import COMPARE
from regtopk.lab.experiments.experiment import Experiment
from regtopk.lab.experiments.paper.fig2 import FIG2
from regtopk.lab.experiments.paper.fig3 import FIG3
from regtopk.lab.experiments.paper.toy import FIG1, SCALING
from regtopk.lab.experiments.ranks.train import TRAIN
from regtopk.lab.experiments.settings import parse_settings

EXPERIMENTS: dict[str, Experiment[Any]] = {"fig1": FIG1, "scaling": SCALING, "fig2": FIG2, "fig3": FIG3}

__all__ = ["COMPARE", "EXPERIMENTS", "TRAIN", "Experiment", "parse_settings"]
