"""A server and the clients that it samples. `app` alone knows how their messages travel: with Flower."""

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
