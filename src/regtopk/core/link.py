"""A stated model of the link between workers: what a step takes, without a clock."""

from dataclasses import dataclass

from regtopk.errors import ArgumentError


@dataclass(frozen=True)
class Link:
    """time_s = compute_s + rounds · latency_s + 8 · bytes / bandwidth.

    Args:
        bandwidth: bits per second, > 0.
        latency_s: seconds a round of messages takes before the first byte, >= 0.
        compute_s: seconds of a step that are not communication, >= 0.
    """

    bandwidth: float
    latency_s: float = 0.0
    compute_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not self.bandwidth > 0:
            raise ArgumentError(f"bandwidth must be > 0 bits per second, got {self.bandwidth!r}")
        for name in ("latency_s", "compute_s"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"{name} must be >= 0 seconds, got {getattr(self, name)!r}")

    def time_s(self, num_bytes: float, num_rounds: int) -> float:
        """Seconds of a step that moves so many bytes through a worker's interface in so many rounds."""
        return self.compute_s + num_rounds * self.latency_s + 8 * num_bytes / self.bandwidth
