"""Train neural networks over slow networks by sending about a hundredth of the bytes.

Training needs what is here: the algorithms, `attach` and its kin, the simulator. A new algorithm is written
with what is in `regtopk.core`.
"""

from regtopk import algorithms, core, distributed, errors, recipes, simulate
from regtopk._version import __version__
from regtopk.algorithms import *  # noqa: F403
from regtopk.core import WarmUp
from regtopk.core.link import Link
from regtopk.distributed import *  # noqa: F403
from regtopk.errors import RegtopkError

__all__ = ["Link", "RegtopkError", "WarmUp", "__version__", "core", "errors", "recipes", "simulate"]
__all__ += algorithms.__all__
__all__ += distributed.__all__
