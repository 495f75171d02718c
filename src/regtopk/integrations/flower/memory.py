"""The file that a client's memory is kept in: packed with a checksum, and checked when it is read.

A damaged memory must not be used: a NaN in the residual would be left out of every update from then on.
"""

import io
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from regtopk.core.state import State
from regtopk.core.worker import Layout
from regtopk.distributed.state.saved import check_state
from regtopk.errors import StateError

_HEAD = b"regtopk-memory:"  # then the checksum; older files begin with what torch.save writes
HEAD_BYTES = len(_HEAD) + 4


def pack(saved: dict[str, Any]) -> bytes:
    """A memory as the bytes of its file."""
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    content = buffer.getvalue()
    return _HEAD + crc32(content).to_bytes(4, "little") + content


def unpack(file: bytes) -> dict[str, Any]:
    """What `pack` was given; a file of an older version has no checksum to compare."""
    if file.startswith(_HEAD):
        checksum, file = int.from_bytes(file[len(_HEAD) : HEAD_BYTES], "little"), file[HEAD_BYTES:]
        if crc32(file) != checksum:
            raise StateError("another checksum: the file is damaged")
    saved: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    return saved


def layout_of(saved: dict[str, Any]) -> Layout:
    """Where the arrays lie in the flat vector."""
    return Layout.of_shapes((name, tuple(shape), kind) for name, shape, kind in saved["layout"])


def check(saved: dict[str, Any], fresh: State, numel: int) -> None:
    """Refuse what does not go together, or is not finite; `fresh` is the state of a client that starts."""
    if not {name for name, *_ in saved["layout"]} <= set(saved["names"]):
        raise StateError(f"names must be those of all arrays, got {saved['names']}")
    for when in ("now", "before"):
        kept = saved[when]
        if kept is None and when == "before":
            continue
        like, state, sent = fresh.state_dict(), kept["state"], kept["sent"]
        has_selection = check_state(state, like, f"the memory {when}")
        flat, values = like["residual"], sent["values"]
        check_state({"model": kept["model"]}, {"model": flat}, f"the memory {when}")
        check_state({"values": values}, {"values": flat[: len(values)]}, f"the message {when}")
        for indices in (sent["indices"], *([state["indices"]] if has_selection else [])):
            _check_indices(indices, numel)
        if type(sent["round"]) is not int or not isinstance(sent["token"], str):
            raise StateError(f"round and token must be a number and a word, got {sent['round']!r}")
        if sent["indices"].shape != values.shape:
            raise StateError(f"indices must be as many as values, {len(values)}, got {len(sent['indices'])}")


def _check_indices(indices: Tensor, numel: int) -> None:
    is_inside = indices.dtype == torch.int64 and bool(((indices >= 0) & (indices < numel)).all())
    if not is_inside:
        raise StateError(f"indices must be whole numbers in 0..{numel - 1}, got {indices.tolist()[:9]}")
