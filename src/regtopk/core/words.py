"""Numbers in sentences."""


def counted(number: int, noun: str) -> str:
    """A number of things: "1 seed", "2 seeds", "1,000 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
