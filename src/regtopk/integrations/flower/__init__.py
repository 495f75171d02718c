"""A server and the clients that it asks now and then: what each keeps, and what they tell each other.

Nothing here knows how messages travel. `regtopk.integrations.flower.app` carries them with Flower.
"""

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
