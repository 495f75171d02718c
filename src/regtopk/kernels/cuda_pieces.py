"""A vector on a GPU that lies in pieces: one launch for all of them, by a table of their addresses."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from regtopk.kernels import reference, triton_pieces
from regtopk.kernels.reference import Support
from regtopk.kernels.triton_launch import launch

_TILE, _TILE_WARPS = 1 << 12, 8  # entries that one program copies
_BLOCK = 1 << 10  # entries that one program scatters


class _Cut(NamedTuple):
    """Where pieces start in the vector, (P + 1,), and the tiles: their pieces and first entries, (T,)."""

    starts: Tensor
    tile_pieces: Tensor
    tile_starts: Tensor


def join_(vector: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """See `reference.join_`."""
    if not _are_alike(pieces):
        return reference.join_(vector, pieces)
    increment_version(vector)  # torch does not see what programs write
    with torch.cuda.device_of(vector):
        num_bad = torch.zeros((), dtype=torch.int32, device=vector.device)
        cut = _cut(tuple(piece.numel() for piece in pieces), vector.device)
        own = {
            "vector": vector, "first": pieces[0], "addresses": _addresses_of(pieces), **cut._asdict(),
            "num_bad": num_bad, "TILE": _TILE,
        }  # fmt: skip
        launch(triton_pieces.join, (len(cut.tile_pieces), 1), own, _TILE_WARPS)
        return num_bad == 0


def spread_(pieces: Sequence[Tensor], vector: Tensor, support: Support) -> None:
    """See `reference.spread_`."""
    if len(pieces) == 1 or not _are_alike(pieces):
        reference.spread_(pieces, vector, support)
        return
    with torch.cuda.device_of(vector):
        torch._foreach_zero_(list(pieces))
        indices = support.indices.contiguous()
        cut = _cut(tuple(piece.numel() for piece in pieces), vector.device)
        own = {
            "vector": vector, "first": pieces[0], "addresses": _addresses_of(pieces), "starts": cut.starts,
            "indices": indices, "num_taken": indices.numel(), "NUM_PIECES": len(pieces),
            "NUM_STEPS": (len(pieces) - 1).bit_length(), "BLOCK": _BLOCK,
        }  # fmt: skip
        launch(triton_pieces.scatter, (-(-indices.numel() // _BLOCK), 1), own)


def _are_alike(pieces: Sequence[Tensor]) -> bool:
    """Whether one program can read all of them: of one type, each one piece of memory."""
    dtype = pieces[0].dtype
    return all(piece.dtype == dtype and piece.is_contiguous() for piece in pieces)


@lru_cache(maxsize=64)
def _cut(sizes: tuple[int, ...], device: torch.device) -> _Cut:
    num_tiles = [-(-size // _TILE) for size in sizes]
    starts = np.cumsum([0, *sizes])
    pieces = np.repeat(np.arange(len(sizes)), num_tiles)
    nth = np.arange(len(pieces)) - np.repeat(np.cumsum([0, *num_tiles])[:-1], num_tiles)
    columns = starts, pieces.astype(np.int32), starts[pieces] + nth * _TILE
    return _Cut(*(torch.from_numpy(column).to(device) for column in columns))


def _addresses_of(pieces: Sequence[Tensor]) -> Tensor:
    return _addresses(tuple(piece.data_ptr() for piece in pieces), pieces[0].device)


@lru_cache(maxsize=64)
def _addresses(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """On the device; the host does not wait until they are there."""
    is_cuda = device.type == "cuda"
    return torch.tensor(addresses, pin_memory=is_cuda).to(device, non_blocking=is_cuda)
