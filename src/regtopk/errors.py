"""What can go wrong, as a small tree.

::

    RegtopkError
    ├── ArgumentError      (also a ValueError)    an option breaks its rule
    ├── GradientError      (also a ValueError)    a gradient of the wrong shape or type, or not finite
    ├── StateError         (also a ValueError)    a saved state that does not fit
    ├── OracleError        (also a RuntimeError)  an algorithm peeks, and this cluster cannot answer
    ├── WireFormatError    (also a ValueError)    a message that is damaged or not ours
    ├── ClusterError       (also a RuntimeError)  the ranks disagree, or the model cannot be attached to
    ├── OutputError        (also an OSError)      a folder that cannot be written, or cannot be read as a run
    │   └── RunExistsError                        a folder that holds another run
    └── MissingExtraError  (also an ImportError)  an optional dependency is not installed

Every message names the argument, the rule and the value, and is raised before any state changes.
"""


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
