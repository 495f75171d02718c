"""A server and the clients that it samples: what each keeps, and what they tell each other.

`Client` and `Server` do not know how messages travel. `SparseMod` and `SparseFedAvg`, in app.py, carry them
with Flower, which is imported when one of these two is asked for.
"""

from typing import Any

from regtopk.integrations.flower.client import Client
from regtopk.integrations.flower.messages import (
    Accepted,
    Instruction,
    Model,
    PastRound,
    Reply,
    Skip,
    is_statistic,
)
from regtopk.integrations.flower.one_message import check_algorithm
from regtopk.integrations.flower.server import Server

_OF_FLOWER = ("SparseFedAvg", "SparseMod", "partition_of")
__all__ = [
    "Accepted",
    "Client",
    "Instruction",
    "Model",
    "PastRound",
    "Reply",
    "Server",
    "Skip",
    "check_algorithm",
    "is_statistic",
]


def __getattr__(name: str) -> Any:
    """Bring what needs Flower."""
    if name not in _OF_FLOWER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from regtopk.integrations.flower import app

    return getattr(app, name)
