"""A server and the clients that it samples.

::

    app.py        SparseMod and SparseFedAvg: the two in Flower's apps
    client.py     Client: what it trains on, sends and remembers; which algorithms it can run
    server.py     Server: the model, and what each client has of it
    messages.py   what they tell each other; none of these three knows how it travels
"""

from typing import Any

from regtopk.integrations.flower.client import Client, check_algorithm
from regtopk.integrations.flower.server import Server

__all__ = ["Client", "Server", "SparseFedAvg", "SparseMod", "check_algorithm"]


def __getattr__(name: str) -> Any:
    """SparseMod and SparseFedAvg, which need Flower."""
    if name not in ("SparseFedAvg", "SparseMod"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from regtopk.integrations.flower import app

    return getattr(app, name)
