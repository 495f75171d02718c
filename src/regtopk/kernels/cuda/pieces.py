"""A vector on a GPU that lies in pieces: one launch for all of them, by a table of their addresses."""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels.cuda.launch import launch
from regtopk.kernels.cuda.programs import pieces as triton_pieces
from regtopk.kernels.reference import pieces as reference_pieces
from regtopk.kernels.reference.pieces import Support

_TILE, _TILE_WARPS = 1 << 12, 8  # entries that one program copies
_BLOCK = 1 << 10  # entries that one program scatters
_dtype_of = attrgetter("dtype")


class _Cut(NamedTuple):
    """Where pieces start in the vector, (P + 1,), and the tiles: their pieces and first entries, (T,)."""

    starts: Tensor
    tile_pieces: Tensor
    tile_starts: Tensor


def join_(vector: Tensor, pieces: Sequence[Tensor], start: Sequence[Tensor] | None = None) -> Tensor:
    """See `reference_pieces.join_`."""
    if not _has_table(pieces) or (start is not None and pieces[0].dtype != vector.dtype):
        return reference_pieces.join_(vector, pieces, start)
    increment_version(vector)  # torch does not see what programs write
    with torch.cuda.device_of(vector):
        num_bad = torch.zeros((), dtype=torch.int32, device=vector.device)
        cut = _cut_of(vector, pieces)
        own = {
            "vector": vector, "first": pieces[0], "addresses": _addresses_of(pieces), **cut._asdict(),
            "start_addresses": _addresses_of(pieces if start is None else start), "num_bad": num_bad,
            "HAS_START": start is not None, "TILE": _TILE,
        }  # fmt: skip
        launch(triton_pieces.join, (len(cut.tile_pieces), 1), own, _TILE_WARPS)
        return num_bad == 0


def clear_(pieces: Sequence[Tensor]) -> None:
    """Make pieces zero."""
    if not _has_table(pieces):
        torch._foreach_zero_(list(pieces))
        return
    increment_version(pieces)
    with torch.cuda.device_of(pieces[0]):
        cut = _cut_of(pieces[0], pieces)
        own = {"first": pieces[0], "addresses": _addresses_of(pieces), **cut._asdict(), "TILE": _TILE}
        launch(triton_pieces.clear, (len(cut.tile_pieces), 1), own, _TILE_WARPS)


def overwrite_if_(flag: Tensor, pieces: Sequence[Tensor], source: Sequence[Tensor] | float) -> None:
    """See `reference_pieces.overwrite_if_`."""
    has_source = not isinstance(source, float)
    others = pieces if isinstance(source, float) else source
    if not _has_table(pieces) or (has_source and not _has_table([pieces[0], *others])):
        reference_pieces.overwrite_if_(flag, pieces, source)
        return
    increment_version(pieces)
    with torch.cuda.device_of(flag):
        cut = _cut_of(flag, pieces)
        own = {
            "flag": flag.view(torch.uint8), "first": pieces[0], "addresses": _addresses_of(pieces),
            "source_addresses": _addresses_of(others), **cut._asdict(), "TILE": _TILE,
            "HAS_SOURCE": has_source, "IS_NAN": source != 0.0,
        }  # fmt: skip
        launch(triton_pieces.overwrite, (len(cut.tile_pieces), 1), own, _TILE_WARPS)


def spread_(pieces: Sequence[Tensor], vector: Tensor, support: Support, are_zero: bool = False) -> None:
    """See `reference_pieces.spread_`."""
    if len(pieces) == 1 or not _has_table(pieces):
        reference_pieces.spread_(pieces, vector, support, are_zero)
        return
    if not are_zero:
        clear_(pieces)
    with torch.cuda.device_of(vector):
        increment_version(pieces)
        indices = support.indices.contiguous()
        cut = _cut_of(vector, pieces)
        own = {
            "vector": vector, "first": pieces[0], "addresses": _addresses_of(pieces), **cut._asdict(),
            "indices": indices, "num_taken": indices.numel(), "NUM_PIECES": len(pieces),
            "NUM_STEPS": (len(pieces) - 1).bit_length(), "TILE": _TILE, "BLOCK": _BLOCK,
        }  # fmt: skip
        launch(triton_pieces.scatter, (-(-indices.numel() // _BLOCK), 1), own)


def _has_table(pieces: Sequence[Tensor]) -> bool:
    """Whether one program can read all of them: of one type, each one piece of memory.

    A table that is first needed in a capture would be copied to the device only when that is replayed.
    """
    is_capturing = pieces[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    are_alike = len(set(map(_dtype_of, pieces))) == 1
    return not is_capturing and are_alike and all(map(Tensor.is_contiguous, pieces))


def _stream_of(tensor: Tensor) -> int:
    """The current stream: tables are made, read and let go of on one."""
    return torch.cuda.current_stream(tensor.get_device()).cuda_stream if tensor.is_cuda else 0


def _cut_of(vector: Tensor, pieces: Sequence[Tensor]) -> _Cut:
    return _cut(tuple(map(Tensor.numel, pieces)), vector.device, _stream_of(vector))


@lru_cache(maxsize=64)
def _cut(sizes: tuple[int, ...], device: torch.device, _stream: int) -> _Cut:
    num_tiles = [-(-size // _TILE) for size in sizes]
    starts = np.cumsum([0, *sizes])
    pieces = np.repeat(np.arange(len(sizes)), num_tiles)
    nth = np.arange(len(pieces)) - np.repeat(np.cumsum([0, *num_tiles])[:-1], num_tiles)
    columns = starts, pieces.astype(np.int32), starts[pieces] + nth * _TILE
    return _Cut(*(torch.from_numpy(column).to(device) for column in columns))


def _addresses_of(pieces: Sequence[Tensor]) -> Tensor:
    return _addresses(tuple(map(Tensor.data_ptr, pieces)), pieces[0].device, _stream_of(pieces[0]))


@lru_cache(maxsize=64)
def _addresses(addresses: tuple[int, ...], device: torch.device, _stream: int) -> Tensor:
    """On the device; the host does not wait until they are there."""
    is_cuda = device.type == "cuda"
    return torch.tensor(addresses, pin_memory=is_cuda).to(device, non_blocking=is_cuda)
