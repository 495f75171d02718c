"""A residual that is kept in bfloat16 from step to step: half the memory.

Algorithms compute in float32 as ever: the residual is widened before a conversation and rounded after it.
Rounding is at random, up with the probability by which the number lies above its lower neighbour::

    E[e'] = e,   |e' - e| < 2^-7 |e|

So nothing is lost on average, and what is far smaller than the residual still adds up: rounding to the
nearest would drop a gradient below 2^-9 of its entry's residual in every step. It costs two passes over the
vector, and a float32 copy of it while the conversation lasts.
"""

import math
from typing import Any

import torch
from torch import Tensor

from regtopk import kernels
from regtopk.core.algorithm import Algorithm, Conversation
from regtopk.core.random import mix, random_words, signed
from regtopk.core.state import State
from regtopk.core.worker import Worker
from regtopk.errors import ArgumentError

RESIDUAL_DTYPES = ("float32", "bfloat16")
_SEED = 0x0B16  # of the draws
_PIECE = 1 << 22  # entries that are rounded at once, so that draws take little memory


def initial_state(algorithm: Algorithm[Any], worker: Worker, residual_dtype: str) -> Any:
    """The state before the first step, its residual as it is kept."""
    state: Any = algorithm.init(worker)
    if residual_dtype == "bfloat16":
        if not isinstance(getattr(state, "residual", None), Tensor):
            raise ArgumentError(
                f"residual_dtype must be 'float32' for {algorithm.name!r}, which keeps no residual, got "
                "'bfloat16'"
            )
        state.residual = state.residual.bfloat16()
    return state


def exchange(algorithm: Algorithm[Any], grad: Tensor, state: State, worker: Worker) -> Conversation:
    """The algorithm's conversation; a residual in bfloat16 is widened before and rounded after it."""
    kept: Any = state
    residual = getattr(state, "residual", None)
    if not isinstance(residual, Tensor) or residual.dtype != torch.bfloat16:
        return (yield from algorithm.exchange(grad, state, worker))
    kept.residual = residual.to(worker.weight.dtype)
    aggregate = yield from algorithm.exchange(grad, state, worker)
    kept.residual = round_at_random(kept.residual, worker.index, worker.step)
    return aggregate


def round_at_random(vector: Tensor, index: Tensor, step: int) -> Tensor:
    """A finite vector (..., J) in bfloat16: each number becomes a neighbour, the nearer more often.

    Draws are a function of the worker's index and the step, so they are the same after a resume.
    """
    is_plain = vector.is_contiguous() and 0 < vector.numel() <= kernels.MAX_ROWS * vector.shape[-1]
    rounded: Tensor
    if is_plain and (programs := kernels.programs_on(vector.device, "random")) is not None:
        rounded = programs.round_at_random(vector, index, signed(mix(_SEED, step)))
        return rounded
    rounded = torch.empty_like(vector, dtype=torch.bfloat16)
    *batch, numel = vector.shape
    size = max(4, _PIECE // math.prod(batch) // 4 * 4)  # of each row; four entries share a word
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        words = random_words(index, _SEED, step, range(start // 4, -(-stop // 4)))  # 16 bits for each entry
        draws = words.view(torch.int16)[..., : stop - start].int() & 0xFFFF  # below what bfloat16 keeps
        bits = vector[..., start:stop].float().view(torch.int32)
        rounded[..., start:stop] = ((bits + draws) & -0x10000).view(torch.float32)
    return rounded
