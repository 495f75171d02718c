"""Every algorithm, one short file each, and the table of their names."""

from typing import Any

from regtopk.algorithms.adacomp import AdaComp
from regtopk.algorithms.adaptive import AdaptiveDensity
from regtopk.algorithms.atomo import Atomo
from regtopk.algorithms.atomo_svd import AtomoSVD
from regtopk.algorithms.chunked_topk import ChunkedTopK
from regtopk.algorithms.consensus import Consensus
from regtopk.algorithms.demo import DeMo
from regtopk.algorithms.dense import Dense
from regtopk.algorithms.dgc import DGC
from regtopk.algorithms.dryden import Dryden
from regtopk.algorithms.ef21 import EF21
from regtopk.algorithms.fair_topk import FairTopK
from regtopk.algorithms.global_topk import GlobalTopK
from regtopk.algorithms.gradient_dropping import GradientDropping
from regtopk.algorithms.gtopk import GTopK
from regtopk.algorithms.hard_threshold import HardThreshold
from regtopk.algorithms.mipd_style import MIPDStyle
from regtopk.algorithms.posterior import PosteriorScore
from regtopk.algorithms.powersgd import PowerSGD
from regtopk.algorithms.random_candidates import RandomCandidates
from regtopk.algorithms.randomk import RandomK
from regtopk.algorithms.regtopk import RegTopK
from regtopk.algorithms.scalecom import ScaleCom
from regtopk.algorithms.sidco import SIDCo
from regtopk.algorithms.sketch import Sketch
from regtopk.algorithms.sparseloco import SparseLoCo
from regtopk.algorithms.strom import Strom
from regtopk.algorithms.topk import TopK
from regtopk.core import Algorithm

# The one list of algorithms, in the order of every table and figure. `ALGORITHMS`, the names that `regtopk`
# exports, the contract tests and docs/algorithms.md follow from it.
# fmt: off
__all__ = [  # noqa: RUF022
    "Dense", "TopK", "RegTopK", "AdaptiveDensity", "Consensus", "DGC", "EF21", "GTopK", "ScaleCom",
    "FairTopK", "Sketch", "MIPDStyle", "ChunkedTopK", "SparseLoCo", "DeMo", "Strom", "Dryden",
    "GradientDropping", "AdaComp", "HardThreshold", "SIDCo", "Atomo", "AtomoSVD", "PowerSGD",
    "RandomK", "RandomCandidates", "GlobalTopK",
]
# fmt: on
ALGORITHMS: dict[str, type[Algorithm[Any]]] = {cls.name: cls for cls in (globals()[name] for name in __all__)}

__all__ += ["ALGORITHMS", "PosteriorScore"]
