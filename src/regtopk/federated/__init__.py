"""A server and the clients that it asks now and then: what each keeps, and what they tell each other.

Nothing here knows how messages travel. `regtopk.integrations.flower` carries them with Flower.
"""

from regtopk.federated.client import Client
from regtopk.federated.messages import Accepted, Instruction, Model, PastRound, Reply, Skip, is_statistic
from regtopk.federated.one_message import check_algorithm
from regtopk.federated.server import Server

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
