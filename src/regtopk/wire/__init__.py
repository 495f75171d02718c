"""Packs, frames and checks what `core.codes` describes. docs/wire-format.md is the specification."""

from regtopk.wire.frame import raise_for_status
from regtopk.wire.message import (
    decode,
    decode_rows,
    decode_segment,
    encode,
    encode_segment,
)

__all__ = [
    "decode",
    "decode_rows",
    "decode_segment",
    "encode",
    "encode_segment",
    "raise_for_status",
]
