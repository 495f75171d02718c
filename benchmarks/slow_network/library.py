"""The text that the benchmarks here train on unless told: the sources of Python's library."""

import sysconfig
from pathlib import Path

MOST_BYTES = 2_000_000


def library_sources() -> str:
    """The modules of Python's library in order of their names, up to 2 MB; packages are left out.

    So are files with characters beyond ASCII, for a small vocabulary, and those that the build wrote.
    """
    parts, num_bytes = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        content = path.read_bytes()
        if path.name.startswith("_sysconfigdata") or not content.isascii():
            continue
        parts.append(content[: MOST_BYTES - num_bytes])
        num_bytes += len(parts[-1])
    if not parts:
        raise SystemExit("this Python has no library sources: give a text file with --data")
    return b"".join(parts).decode("ascii")
