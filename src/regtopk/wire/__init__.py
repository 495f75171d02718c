"""Messages as bytes: what `core.codes` describes is packed, framed and checked here.

docs/wire-format.md is the specification. A new code of values belongs to `values`, one of indices to
`indices`; its size to `core.codes`, its number to `frame`, and its meaning to the specification and to
tests/wire/slow_decoder.py.
"""

from regtopk.wire.frame import raise_for_status
from regtopk.wire.message import decode, decode_rows, decode_segment, encode, encode_segment

__all__ = ["decode", "decode_rows", "decode_segment", "encode", "encode_segment", "raise_for_status"]
