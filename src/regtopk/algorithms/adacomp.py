"""AdaComp: as many entries of every bin as are active in it."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regtopk.core import (
    Algorithm,
    Conversation,
    Layer,
    ResidualState,
    SparseSum,
    Worker,
    check_integer,
    exact_sum,
    send_instead_,
    take_where_,
)


@dataclass(frozen=True, kw_only=True)
class AdaComp(Algorithm[ResidualState]):
    """Adaptive residual gradient compression (Chen et al. 2018).

    a_n = e_n + g_n, H_n = a_n + g_n, and in every bin b of a layer m_b = max |a_nj|
    s_n = {j : |H_nj| >= m_b of its bin}
    send j in s_n and its sign; its value is the mean of the layer's m_b
    receive g = sum_n w_n (sent), e_n := a_n - sent

    H counts the gradient twice: it guesses what a will be after one more step like this one. An entry is sent
    if that guess reaches the largest |a| of its bin. So the number of entries sent follows the activity of a
    layer; there is no density.

    Use it for: a density that follows the gradients, with nothing to tune.

    Args:
        bin_conv: entries per bin in layers of kind "conv", >= 1.
        bin_other: entries per bin in all other layers, >= 1; the last bin of a layer may be shorter.

    Differs from the paper: zeros are not sent. A value costs one bit, plus two floats per 128 entries. If
    these entries belong to several layers, they share the two floats, and what these miss stays in the
    residual. Indices travel in the cluster's index code, not as 8 or 16 bits within a bin.

    Checked against the equations, programmed a second time: the same entries, and the same values except
    where layers share two floats. Of the paper only the abstract was at hand.
    """

    name: ClassVar[str] = "adacomp"
    promises = frozenset({"conserves", "replicates"})
    bin_conv: int = 50
    bin_other: int = 500

    def __post_init__(self) -> None:
        """Check the options."""
        check_integer("bin_conv", self.bin_conv, at_least=1)
        check_integer("bin_other", self.bin_other, at_least=1)

    def init(self, worker: Worker) -> ResidualState:
        """The residual starts at zero."""
        return ResidualState(residual=worker.zeros())

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        """One step of AdaComp."""
        accumulated = state.residual.add_(grad)
        is_taken = torch.empty_like(accumulated, dtype=torch.bool)
        layers = [layer for layer in worker.layout.layers if layer.numel > 0]
        scales = []
        for layer in layers:
            at = slice(layer.start, layer.start + layer.numel)
            own, ahead = accumulated[..., at], accumulated[..., at] + grad[..., at]
            size = min(layer.numel, self._bin(layer))
            largest = _largest_per_bin(own, size)
            reached = largest.repeat_interleave(size, dim=-1)[..., : layer.numel]
            is_taken[..., at] = (ahead.abs() >= reached) & (own != 0)
            scales.append(exact_sum(largest) / largest.shape[-1])
        taken = take_where_(accumulated, is_taken)
        starts = torch.tensor([layer.start for layer in layers], device=grad.device)
        layer_of = torch.bucketize(taken.indices, starts, right=True) - 1
        scale = torch.stack(scales, dim=-1).to(accumulated.dtype).gather(-1, layer_of)
        sent = send_instead_(accumulated, taken, scale * taken.values.sign(), code="sign")
        return (yield from SparseSum(sent, worker.weight))

    def _bin(self, layer: Layer) -> int:
        return self.bin_conv if layer.kind == "conv" else self.bin_other


def _largest_per_bin(x: Tensor, size: int) -> Tensor:
    """max |x| of every bin: (..., n) gives (..., ceil(n / size))."""
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % size))
    largest: Tensor = padded.unflatten(-1, (-1, size)).amax(-1)
    return largest
