"""Messages as bytes: what `core.codes` describes is packed, framed and checked here.

docs/wire-format.md is the specification. A new code of values has its rounding and size in `core.codes`, or
in `core.blocks` if values share scales; its words in `values` (of indices: `indices`), its number in `frame`,
and its meaning in the specification and in tests/wire/slow_decoder.py.
"""

from regtopk.wire.frame import raise_for_status
from regtopk.wire.message import decode, decode_rows, decode_segment, encode, encode_rows, encode_segment

__all__ = [
    "decode", "decode_rows", "decode_segment", "encode", "encode_rows", "encode_segment", "raise_for_status",
]  # fmt: skip
