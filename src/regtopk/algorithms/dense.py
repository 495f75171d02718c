"""Dense: send everything. The yardstick."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regtopk.core.algorithm import Algorithm, Conversation
from regtopk.core.codes import check_value_code
from regtopk.core.requests import DenseSum
from regtopk.core.state import NoState
from regtopk.core.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Dense(Algorithm[NoState]):
    """Distributed SGD without sparsification.

    g^t = sum_n w_n g_n^t                                                     (the paper's Eq. 1)

    Args:
        value_code: how values are coded on the wire.
    """

    name: ClassVar[str] = "dense"
    value_code: str = "float32"

    def __post_init__(self) -> None:
        """Check the options."""
        check_value_code(self.value_code)

    def init(self, worker: Worker) -> NoState:
        """Nothing is kept."""
        return NoState()

    def exchange(self, grad: Tensor, state: NoState, worker: Worker) -> Conversation:
        """Send the gradient as it is."""
        aggregate: Tensor = yield DenseSum(grad, worker.weight, self.value_code)
        return aggregate
