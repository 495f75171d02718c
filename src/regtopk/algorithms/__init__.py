"""Every algorithm, one short file each, and the table of their names."""

from typing import Any

from regtopk.algorithms.adacomp import AdaComp
from regtopk.algorithms.adaptive import AdaptiveDensity
from regtopk.algorithms.atomo import Atomo
from regtopk.algorithms.atomo_svd import AtomoSVD
from regtopk.algorithms.chunked_topk import ChunkedTopK
from regtopk.algorithms.consensus import Consensus
from regtopk.algorithms.dense import Dense
from regtopk.algorithms.dgc import DGC
from regtopk.algorithms.dryden import Dryden
from regtopk.algorithms.ef21 import EF21
from regtopk.algorithms.fair_topk import FairTopK
from regtopk.algorithms.global_topk import GlobalTopK
from regtopk.algorithms.gradient_dropping import GradientDropping
from regtopk.algorithms.gtopk import GTopK
from regtopk.algorithms.hard_threshold import HardThreshold
from regtopk.algorithms.mipd import MIPD
from regtopk.algorithms.random_candidates import RandomCandidates
from regtopk.algorithms.randomk import RandomK
from regtopk.algorithms.regtopk import RegTopK
from regtopk.algorithms.scalecom import ScaleCom
from regtopk.algorithms.sidco import SIDCo
from regtopk.algorithms.sketch import Sketch
from regtopk.algorithms.strom import Strom
from regtopk.algorithms.topk import TopK
from regtopk.core.algorithm import Algorithm

ALGORITHMS: dict[str, type[Algorithm[Any]]] = {
    "dense": Dense,
    "topk": TopK,
    "regtopk": RegTopK,
    "adaptive": AdaptiveDensity,
    "consensus": Consensus,
    "dgc": DGC,
    "ef21": EF21,
    "gtopk": GTopK,
    "scalecom": ScaleCom,
    "fair-topk": FairTopK,
    "sketch": Sketch,
    "mipd": MIPD,
    "chunked-topk": ChunkedTopK,
    "strom": Strom,
    "dryden": Dryden,
    "gradient-dropping": GradientDropping,
    "adacomp": AdaComp,
    "hard-threshold": HardThreshold,
    "sidco": SIDCo,
    "atomo": Atomo,
    "atomo-svd": AtomoSVD,
    "randomk": RandomK,
    "random-candidates": RandomCandidates,
    "global-topk": GlobalTopK,
}

__all__ = [
    "ALGORITHMS",
    "DGC",
    "EF21",
    "MIPD",
    "AdaComp",
    "AdaptiveDensity",
    "Atomo",
    "AtomoSVD",
    "ChunkedTopK",
    "Consensus",
    "Dense",
    "Dryden",
    "FairTopK",
    "GTopK",
    "GlobalTopK",
    "GradientDropping",
    "HardThreshold",
    "RandomCandidates",
    "RandomK",
    "RegTopK",
    "SIDCo",
    "ScaleCom",
    "Sketch",
    "Strom",
    "TopK",
]
