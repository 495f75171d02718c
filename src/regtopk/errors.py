"""What can go wrong. A message names the argument, the rule and the value; nothing has changed by then."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("regtopk")  # where training goes on all the same


class RegtopkError(Exception):
    """Root of every error this package raises on purpose."""


class ArgumentError(RegtopkError, ValueError):
    """An option breaks its rule."""


class GradientError(RegtopkError, ValueError):
    """A gradient has the wrong shape or type, or is not finite."""


class StateError(RegtopkError, ValueError):
    """A saved state does not fit this algorithm, cluster or model."""


class OracleError(RegtopkError, RuntimeError):
    """An algorithm peeked at what no real cluster can know."""


class WireFormatError(RegtopkError, ValueError):
    """A message is damaged, truncated or in another format."""


class ClusterError(RegtopkError, RuntimeError):
    """The ranks of a process group disagree, or a model cannot be attached to."""


class OutputError(RegtopkError, OSError):
    """An output folder cannot be written, or a folder cannot be read as a run."""


class RunExistsError(OutputError):
    """An output folder holds a run already, which is not replaced unasked."""


class MissingExtraError(RegtopkError, ImportError):
    """An optional dependency is not installed; the message says which extra brings it."""


@contextmanager
def importing(advice: str) -> Iterator[None]:
    """Import optional dependencies inside; where one is missing, a `MissingExtraError` gives the advice."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(advice) from error
