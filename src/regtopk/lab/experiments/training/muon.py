"""Muon (Jordan et al., 2024) for the matrices in a transformer's blocks: torch's, and one for many models."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from regtopk.core.worker import Layout

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
NUM_ITERATIONS = 5
EPS = 1e-7
MOST_SHAPES = 64  # of batches of matrices that code is compiled for: by layer, workers and seeds
# updates as large as AdamW's, so that its learning rates fit; whoever uses it lets matrices decay
TorchMuon = partial(torch.optim.Muon, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")


def is_for_muon(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix in a block: embeddings, an output layer, norms and biases are not."""
    return len(shape) == 2 and name.startswith("blocks.")


class FlatMuon(Optimizer):
    """Muon on the blocks' matrices of flat models (..., J), another optimizer on the rest of them.

    Each model goes its own way, as it would with torch.optim.Muon:

        B := B + (1 - momentum) (g - B)
        theta := theta - lr 0.2 sqrt(max(m, n)) orthogonalise(g + momentum (B - g))

    Matrices of one shape, of all layers and models, are one batch. `make_rest` makes the other optimizer from
    parameters and lr; `param_groups` holds the learning rate of both.
    """

    def __init__(
        self, models: Tensor, layout: Layout, make_rest: Callable[..., Optimizer], lr: float, momentum: float
    ) -> None:
        super().__init__([models], {"lr": lr})
        self._models, self._momentum = models, momentum
        self._starts: dict[tuple[int, ...], list[int]] = {}  # of the matrices of a shape
        is_rest = torch.ones(layout.numel, dtype=torch.bool)
        for layer in layout.layers:
            if is_for_muon(layer.name, layer.shape):
                self._starts.setdefault(layer.shape, []).append(layer.start)
                is_rest[layer.start : layer.start + layer.numel] = False
        for shape in self._starts:
            self.state[models][_key(shape)] = torch.zeros_like(self._matrices(models, shape))
        self._directions_of = _compiled() if models.is_cuda else directions_of
        self._rest_at = is_rest.nonzero().flatten().to(models.device)
        self._rest = models[..., self._rest_at]  # a copy, which the other optimizer steps
        self._rest_optimizer = make_rest([self._rest], lr=lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take a step by the gradients that the models hold."""
        models, grads, lr = self._models, self._models.grad, self.param_groups[0]["lr"]
        assert grads is not None
        for shape in self._starts:
            momenta = self.state[models][_key(shape)]
            directions = self._directions_of(self._matrices(grads, shape), momenta, self._momentum)
            self._matrices(models, shape).add_(directions, alpha=-lr * (0.2 * math.sqrt(max(shape))))
        self._rest.copy_(models[..., self._rest_at])
        self._rest.grad = grads[..., self._rest_at]
        self._rest_optimizer.param_groups[0]["lr"] = lr
        self._rest_optimizer.step()
        models.index_copy_(-1, self._rest_at, self._rest)

    def _matrices(self, models: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The matrices of a shape, (..., L, m, n), as one view: blocks are alike, they lie evenly."""
        first, *others = self._starts[shape]
        step = others[0] - first if others else 0
        assert all(start == first + place * step for place, start in enumerate(others, 1))
        sizes = *models.shape[:-1], len(others) + 1, *shape
        strides = *models.stride()[:-1], step, shape[1], 1
        return models.as_strided(sizes, strides, models.storage_offset() + first)

    def state_dict(self) -> dict[str, Any]:
        """The momenta, and the state of the other optimizer."""
        return {**super().state_dict(), "rest": self._rest_optimizer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        own = dict(state_dict)
        self._rest_optimizer.load_state_dict(own.pop("rest"))
        super().load_state_dict(own)


def _key(shape: tuple[int, ...]) -> str:
    return "momenta {} x {}".format(*shape)


def directions_of(grads: Tensor, momenta: Tensor, momentum: float) -> Tensor:
    """Move the momenta on, and orthogonalise where they lead to: matrices (..., m, n) in bfloat16."""
    momenta.lerp_(grads, 1 - momentum)
    return orthogonalised(grads.lerp(momenta, momentum).bfloat16())


@cache
def _compiled() -> Callable[[Tensor, Tensor, float], Tensor]:
    """On a GPU its passes over memory are fused, for each shape of its own."""
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    return torch.compile(directions_of, dynamic=False)


def orthogonalised(matrices: Tensor) -> Tensor:
    """What torch.optim.Muon makes of each of (..., m, n), in bfloat16: U S V^T with S near 1.

    All are one batch of the Newton-Schulz iteration. The bits are torch.optim.Muon's on x86 CPUs and on those
    without bfloat16. Elsewhere products of a batch may add in another order.
    """
    a, b, c = COEFFICIENTS
    # a CPU without bfloat16 takes a hundred times longer for products in it than for float32's, rounded
    is_native = matrices.is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    dtype = torch.bfloat16 if is_native else torch.float32

    def rounded(product: Tensor) -> Tensor:
        return product.bfloat16().to(dtype)

    x = matrices.flatten(0, -3)
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = (x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)).to(dtype)
    for _ in range(NUM_ITERATIONS):
        gram = rounded(x @ x.mT)
        x = rounded(torch.baddbmm(x, rounded(torch.baddbmm(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return (x.mT if is_tall else x).view(matrices.shape)
