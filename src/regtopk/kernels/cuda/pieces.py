"""A vector on a GPU that lies in pieces: one launch for all of them, by a table of their addresses."""

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels.cuda.launch import launch
from regtopk.kernels.cuda.programs.pieces import join, overwrite, scatter
from regtopk.kernels.reference import pieces as reference
from regtopk.kernels.reference.pieces import Pieces, Support

_TILE, _TILE_WARPS = 1 << 10, 4  # entries that one program copies
_BLOCK = 1 << 10  # entries that one program scatters
_COPIED = 48  # entries that are copied with their neighbours take as long as one that is scattered
_dtype_of = attrgetter("dtype")


def join_(vector: Tensor, pieces: Sequence[Tensor], start: Sequence[Tensor] | None = None) -> Tensor:
    """See `reference.pieces.join_`."""
    table = None if start is not None and pieces[0].dtype != vector.dtype else _table_of(pieces)
    if table is None:
        return reference.join_(vector, pieces, start)
    increment_version(vector)  # torch does not see what programs write
    with torch.cuda.device_of(vector):
        num_bad = torch.zeros((), dtype=torch.int32, device=vector.device)
        own = {"vector": vector, "num_bad": num_bad, "HAS_START": start is not None}
        own["start_addresses"] = table["addresses"] if start is None else _addresses_of(start)
        launch(join, (len(table["tile_pieces"]), 1), table | own, _TILE_WARPS)
        return num_bad == 0


def overwrite_if_(flag: Tensor, pieces: Sequence[Tensor], source: Sequence[Tensor] | float) -> None:
    """See `reference.pieces.overwrite_if_`."""
    for dtype in set(map(_dtype_of, pieces)):  # a program takes one
        places = [place for place, piece in enumerate(pieces) if piece.dtype == dtype]
        own = [pieces[place] for place in places]
        others = source if isinstance(source, float) else [source[place] for place in places]
        table = _table_of(own)
        if table is None or not (isinstance(others, float) or _are_alike(own[:1] + others)):
            reference.overwrite_if_(flag, own, others)
            continue
        increment_version(own)
        with torch.cuda.device_of(flag):
            _overwrite_if_(flag, table, others if isinstance(others, float) else _addresses_of(others))


def spread_(pieces: Sequence[Tensor], vector: Tensor, support: Support) -> None:
    """See `reference.pieces.spread_`."""
    table = None if len(pieces) == 1 else _table_of(pieces)
    if table is None:
        reference.spread_(pieces, vector, support)
        return
    increment_version(pieces)
    always = _true(vector.device, _stream_of(vector))
    with torch.cuda.device_of(vector):
        if support.indices.numel() * _COPIED > vector.numel() and vector.dtype == pieces[0].dtype:
            _overwrite_if_(always, table, table["starts"] * vector.itemsize + vector.data_ptr())
            return
        _overwrite_if_(always, table, 0.0)
        indices = support.indices.contiguous()
        own = {
            "vector": vector, "indices": indices, "num_taken": indices.numel(), "NUM_PIECES": len(pieces),
            "NUM_STEPS": (len(pieces) - 1).bit_length(), "BLOCK": _BLOCK,
        }  # fmt: skip
        launch(scatter, (-(-indices.numel() // _BLOCK), 1), table | own)


def _overwrite_if_(flag: Tensor, table: dict[str, Any], source: Tensor | float) -> None:
    """Write zero, NaN or what lies at a source's addresses."""
    has_source = isinstance(source, Tensor)
    own = {
        "flag": flag.view(torch.uint8), "source_addresses": source if has_source else table["addresses"],
        "HAS_SOURCE": has_source, "IS_NAN": not has_source and source != 0.0,
    }  # fmt: skip
    launch(overwrite, (len(table["tile_pieces"]), 1), table | own, _TILE_WARPS)


def _table_of(pieces: Sequence[Tensor]) -> dict[str, Any] | None:
    """What every program reads: any piece for their type, where all lie, and how they are cut into tiles.

    None if one program cannot read all. To ask every tensor takes the host as long as a program runs, so it
    is done once for `Pieces`. A table that is first needed in a capture would be copied to the device only
    when that is replayed.
    """
    if isinstance(pieces, Pieces) and pieces.table is not None:
        return pieces.table
    is_capturing = pieces[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if is_capturing or not _are_alike(pieces):
        return None
    tiles = _tiles(tuple(map(Tensor.numel, pieces)), pieces[0].device, _stream_of(pieces[0]))
    table = {"first": pieces[0], "addresses": _addresses_of(pieces), "TILE": _TILE, **tiles}
    if isinstance(pieces, Pieces):
        pieces.table = table
    return table


def _are_alike(pieces: Sequence[Tensor]) -> bool:
    """Whether they are of one type, each one piece of memory."""
    return len(set(map(_dtype_of, pieces))) == 1 and all(map(Tensor.is_contiguous, pieces))


def _stream_of(tensor: Tensor) -> int:
    """The current stream: tables are made, read and let go of on one."""
    return torch.cuda.current_stream(tensor.get_device()).cuda_stream if tensor.is_cuda else 0


@lru_cache(maxsize=64)
def _tiles(sizes: tuple[int, ...], device: torch.device, _stream: int) -> dict[str, Tensor]:
    """Where pieces start in the vector, (P + 1,), and the tiles: their pieces and first entries, (T,)."""
    num_tiles = [-(-size // _TILE) for size in sizes]
    starts = np.cumsum([0, *sizes])
    pieces = np.repeat(np.arange(len(sizes)), num_tiles)
    nth = np.arange(len(pieces)) - np.repeat(np.cumsum([0, *num_tiles])[:-1], num_tiles)
    columns = starts, pieces.astype(np.int32), starts[pieces] + nth * _TILE
    tensors = (torch.from_numpy(column).to(device) for column in columns)
    return dict(zip(("starts", "tile_pieces", "tile_starts"), tensors, strict=True))


def _addresses_of(pieces: Sequence[Tensor]) -> Tensor:
    return _addresses(tuple(map(Tensor.data_ptr, pieces)), pieces[0].device, _stream_of(pieces[0]))


@lru_cache(maxsize=64)
def _addresses(addresses: tuple[int, ...], device: torch.device, _stream: int) -> Tensor:
    """On the device; the host does not wait until they are there."""
    is_cuda = device.type == "cuda"
    return torch.tensor(addresses, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


@lru_cache(maxsize=64)
def _true(device: torch.device, _stream: int) -> Tensor:
    return torch.ones((), dtype=torch.bool, device=device)
