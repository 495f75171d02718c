"""AdaComp: as many entries of every bin as are active in it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.core import Conversation, ErrorFeedback, ResidualState, SparseSum, Worker, exact_sum
from regtopk.core.options import integer, option
from regtopk.core.sparse import send_instead_, take_where_


@dataclass(frozen=True, kw_only=True)
class AdaComp(ErrorFeedback):
    """Adaptive residual gradient compression (Chen et al. 2018).

    a_n = e_n + g_n, H_n = a_n + g_n, and in every bin b of a layer m_b = max |a_nj|
    s_n = {j : |H_nj| >= m_b of its bin}
    send j in s_n and its sign; its value is the mean of the layer's m_b
    receive g = sum_n w_n (sent), e_n := a_n - sent

    H guesses what a will be after one more step like this one. An entry is sent if that guess reaches the
    largest |a| of its bin.

    Use it for: a density that follows the gradients, with nothing to tune.

    Args:
        bin_conv: entries per bin in layers of kind "conv", >= 1.
        bin_other: entries per bin in all other layers, >= 1; the last bin of a layer may be shorter.

    Differs from the paper: zeros are not sent; layers share two floats per 128 entries, and what these miss
    stays in the residual.

    Checked against the equations, programmed a second time. Of the paper only the abstract was at hand.
    """

    name = "adacomp"
    promises = frozenset({"conserves", "replicates"})
    bin_conv: int = option(50, integer(at_least=1))
    bin_other: int = option(500, integer(at_least=1))

    def exchange(self, grad: Tensor, state: ResidualState, worker: Worker) -> Conversation:
        accumulated = state.residual.add_(grad)
        is_taken = torch.empty_like(accumulated, dtype=torch.bool)
        layers = [layer for layer in worker.layout.layers if layer.numel > 0]
        scales = []
        for layer in layers:
            own = accumulated[..., layer.entries]
            ahead = own + grad[..., layer.entries]
            size = min(layer.numel, self.bin_conv if layer.kind == "conv" else self.bin_other)
            bins = torch.nn.functional.pad(own.abs(), (0, -layer.numel % size)).unflatten(-1, (-1, size))
            largest = bins.amax(-1)
            reached = largest.repeat_interleave(size, dim=-1)[..., : layer.numel]
            is_taken[..., layer.entries] = (ahead.abs() >= reached) & (own != 0)
            scales.append(exact_sum(largest) / largest.shape[-1])
        taken = take_where_(accumulated, is_taken)
        starts = torch.tensor([layer.start for layer in layers], device=grad.device)
        layer_of = torch.bucketize(taken.indices, starts, right=True) - 1
        scale = torch.stack(scales, dim=-1).to(accumulated.dtype).gather(-1, layer_of)
        sent = send_instead_(accumulated, taken, scale * taken.values.sign(), code="sign")
        return (yield from SparseSum(sent, worker.weight))
