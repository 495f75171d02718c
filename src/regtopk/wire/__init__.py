"""Messages as bytes: what `core.codes` describes is packed, framed and checked here.

docs/wire-format.md is the specification, and CONTRIBUTING.md says what a new code needs.
"""

from regtopk.wire.frame import raise_for_status
from regtopk.wire.message import decode, decode_rows, decode_segment, encode, encode_rows, encode_segment

__all__ = [
    "decode", "decode_rows", "decode_segment", "encode", "encode_rows", "encode_segment", "raise_for_status",
]  # fmt: skip
