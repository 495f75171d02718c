"""Ranks for scripts of frameworks, which make process groups of their own."""

from tests.distributed.conftest import new_ranks, two_ranks

__all__ = ["new_ranks", "two_ranks"]
