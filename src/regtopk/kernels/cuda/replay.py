"""Launches that are made in every step become one: a CUDA graph that is captured here, and replayed.

Callers see no difference: they own what a function returns. Its temporaries stay allocated. docs/kernels.md
says when it is captured.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

Outputs = TypeVar("Outputs", bound=tuple[Tensor, ...])
_PLAIN_CALLS = 2  # they compile and load what the launches need, which must not happen in a capture
_MOST_GRAPHS = 256  # more are not captured
_MOST_COUNTED = 4096
_log = logging.getLogger("regtopk")


class _Captured(NamedTuple):
    stream: Any
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]


_lock = threading.Lock()  # one capture at a time
_this_thread = threading.local()
_captured: dict[Any, _Captured] = {}
_num_calls: Counter[Any] = Counter()
_refused: set[Any] = set()
_side_streams: dict[int, torch.cuda.Stream] = {}  # memory is shared only by what was captured on one stream


def capture_nothing_in_this_thread() -> None:
    """For a thread beside others that work on the same device, whose random numbers a capture disturbs."""
    _this_thread.captures = False


def repeat(
    function: Callable[..., Outputs],
    settings: tuple[Any, ...],
    fixed: Sequence[Tensor],
    inputs: Sequence[Tensor] = (),
) -> Outputs:
    """What ``function(*settings, *fixed, *inputs)`` returns.

    Args:
        function: it launches on the current stream, and reads nothing back. It has no effect but on tensors.
        settings: all else that the launches depend on; hashable.
        fixed: large tensors, which it may change. Replayed are launches on tensors at the same addresses.
        inputs: small tensors, which are copied.
    """
    call, device = partial(function, *settings, *fixed), (*fixed, *inputs)[0].device
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return call(*inputs)
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return repeat(function, settings, fixed, inputs)
    stream = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    at = tuple((tensor.data_ptr(), *_shape_of(tensor)) for tensor in fixed)
    key = function, settings, stream, at, tuple(map(_shape_of, inputs))
    captured = _captured.get(key)
    if captured is None:
        with _lock:
            if _is_due(key):
                captured = _capture(key, call, inputs)
    if captured is None:
        return call(*inputs)
    if inputs:
        torch._foreach_copy_(captured.inputs, list(inputs))
    captured.graph.replay()
    return cast(Outputs, tuple(map(Tensor.clone, captured.outputs)))


def _shape_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _is_due(key: Any) -> bool:
    """Whether a call was made often enough; a size that changes in every step never is."""
    if key in _refused or len(_captured) >= _MOST_GRAPHS or not getattr(_this_thread, "captures", True):
        return False
    if len(_num_calls) > _MOST_COUNTED:
        _num_calls.clear()
    _num_calls[key] += 1
    return _num_calls[key] > _PLAIN_CALLS


def _capture(key: Any, call: partial[Any], inputs: Sequence[Tensor]) -> _Captured | None:
    """Capture the launches without making them; None if the function cannot be captured."""
    device, current = torch.cuda.current_device(), torch.cuda.current_stream()
    stream = device, current.cuda_stream
    side = _side_streams.setdefault(device, torch.cuda.Stream())
    # Graphs of one stream run one after another, so they share their memory.
    pool = next((other.graph.pool() for other in _captured.values() if other.stream == stream), None)
    graph, own = torch.cuda.CUDAGraph(), [torch.empty_like(tensor) for tensor in inputs]
    outputs: tuple[Tensor, ...] | None = None
    side.wait_stream(current)
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            outputs = call(*own)
        except RuntimeError as error:
            _refused.add(key)
            _log.warning("%s runs as single launches, which is slower: %s", call.func.__name__, error)
        finally:
            graph.capture_end()  # if this fails, torch's allocator is not to be relied on: it must be heard
    current.wait_stream(side)
    del _num_calls[key]
    if outputs is None:
        return None
    _captured[key] = _Captured(stream, graph, own, outputs)
    return _captured[key]
