"""Lets the ranks of a test go on before they have heard from the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from regtopk.distributed.steps.agreement import Agreement
from regtopk.distributed.transport.collectives import Collectives


@contextmanager
def answers_on_the_device() -> Iterator[list[Agreement]]:
    """Let ranks go on without the others' answers, as they do over NCCL; what they did not wait for."""
    late: list[Agreement] = []
    go_on = Agreement.go_on

    def note(self: Agreement) -> None:
        late.append(self)
        go_on(self)

    with (
        patch.object(Collectives, "is_on_device", lambda self, device: True),
        patch.object(Agreement, "go_on", note),
    ):
        yield late
