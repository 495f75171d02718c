"""Where namespaces can be made."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.slow_network.links import why_no_kernel_links

# a container's root may lack the right, a kernel the modules
reason = why_no_kernel_links(latency_s=0.0)
needs_namespaces: Callable[..., Any] = pytest.mark.skipif(reason is not None, reason=str(reason))
