"""Where namespaces can be made."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.slow_network.__main__ import links_of
from benchmarks.slow_network.namespaces import NetworkError, check_possible


def why_not() -> str | None:
    """Why no namespaces can be made here; None where they can."""
    try:
        check_possible()
        with links_of(2) as links:  # a container's root may lack the right, a kernel the modules
            links.shape(100e6)
    except NetworkError as error:
        return str(error)
    return None


reason = why_not()
needs_namespaces: Callable[..., Any] = pytest.mark.skipif(reason is not None, reason=str(reason))
