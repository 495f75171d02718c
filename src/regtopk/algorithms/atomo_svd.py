"""Spectral ATOMO: an unbiased sample of the gradient's singular vectors, layer by layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regtopk.algorithms.atomo import Atomo, draw_entries, keep_probability
from regtopk.core import Conversation, Gather, Gathered, Layer, NoState, SparseSum, Worker, uniform


@dataclass(frozen=True, kw_only=True)
class AtomoSVD(Atomo):
    """Atomic sparsification with singular vectors as atoms (Wang et al. 2018).

    G = sum_i sigma_i u_i v_i', the gradient of a layer as an (a, b) matrix
    p_i = min(1, s sigma_i / sum sigma) by the sequential rule, s = density a b / (a + b)
    send (sigma_i / p_i) u_i and v_i with probability p_i: a + b numbers per atom, gathered by all
    receive g = sum_n w_n sum_i (sigma_i / p_i) u_i v_i'

    The entries of vectors are drawn one by one, as in `Atomo`. What a worker receives grows with N. Values
    are not coded, since rounding would bias them. One singular value decomposition per layer and step is
    slow. Its last bits may depend on the number of threads, for matrices of a few hundred rows and more:
    ranks then equal the simulator to the bit only if they run as many threads.

    Use it for: unbiased estimates of matrices of low rank.

    Args:
        density, k: as in `WithDensity`, of the numbers sent on average.
        seed: an integer; draws are a function of (seed, n, t, i).

    Differs from the authors' code, which folds convolutions otherwise, cuts probabilities at 1 without the
    sequential rule, and draws again (a bias) if no atom was kept.
    """

    name = "atomo-svd"
    promises = frozenset({"unbiased"})

    def exchange(self, grad: Tensor, state: NoState, worker: Worker) -> Conversation:
        density = self.num_selected(worker) / worker.numel
        x = grad.to(worker.weight.dtype)
        matrices = [layer for layer in worker.layout.layers if len(layer.shape) > 1 and layer.numel > 0]
        is_outside = torch.ones(worker.numel, dtype=torch.bool)
        for layer in matrices:
            is_outside[layer.entries] = False
        rest = is_outside.nonzero().flatten().to(grad.device)
        num_atoms = sum(min(layer.sides) for layer in matrices)
        draws = uniform(worker.index, self.seed, worker.step, len(rest) + num_atoms)
        aggregate = x.new_zeros(worker.numel)
        if len(rest) > 0:
            k = max(1, round(density * len(rest)))
            sent = draw_entries(x[..., rest], k, draws[..., : len(rest)])
            aggregate[rest] = yield from SparseSum(sent, worker.weight)
        if matrices:
            message, count = _messages(worker.weight * x, matrices, density, draws[..., len(rest) :])
            gathered = yield from Gather(message, count)
            _add_atoms_(aggregate, gathered, matrices)
        return aggregate


def _messages(x: Tensor, matrices: list[Layer], density: float, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Each worker's message, (..., m), and how many of its numbers are valid, (...,).

    Workers are taken one by one: the decomposition of a batch need not have the same bits.
    """
    rows = [
        _message(row, matrices, density, drawn)
        for row, drawn in zip(x.view(-1, x.shape[-1]), draws.view(-1, draws.shape[-1]), strict=True)
    ]
    count = torch.tensor([len(row) for row in rows], device=x.device).view(x.shape[:-1])
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded.view(*x.shape[:-1], -1), count


def _message(x: Tensor, matrices: list[Layer], density: float, draws: Tensor) -> Tensor:
    """One worker's message: how many atoms each matrix has, then u and v of each atom."""
    numbers, atoms, first = [], [], 0
    for layer in matrices:
        a, b = layer.sides
        matrix = x[layer.entries].view(a, b)
        u, sigma, v = torch.linalg.svd(matrix, full_matrices=False)
        probability = keep_probability(sigma, density * a * b / (a + b))
        kept = (draws[first : first + len(sigma)] < probability).nonzero().flatten()
        scale = (sigma.double() / probability)[kept].to(x.dtype)
        atoms.append(torch.cat([u.t()[kept] * scale.unsqueeze(-1), v[kept]], dim=-1).flatten())
        numbers.append(len(kept))
        first += len(sigma)
    return torch.cat([torch.tensor(numbers).to(x), *atoms])


def _add_atoms_(aggregate: Tensor, gathered: Gathered, matrices: list[Layer]) -> None:
    """Add all workers' atoms in rank order, one by one: a matrix product may add in another order."""
    for row, count in zip(gathered.rows, gathered.counts.tolist(), strict=True):
        message = row[:count]  # empty from a worker of weight zero
        numbers, message = message[: len(matrices)].tolist(), message[len(matrices) :]
        for layer, number in zip(matrices, numbers, strict=False):
            a, b = layer.sides
            total = aggregate[layer.entries].view(a, b)
            atoms, message = message.tensor_split([int(number) * (a + b)])
            for atom in atoms.view(-1, a + b):
                total += atom[:a].unsqueeze(-1) * atom[a:]
