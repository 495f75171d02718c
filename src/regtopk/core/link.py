"""A stated model of a link: what a step takes, without a clock. `regtopk.lab.plan.link` assumes more."""

from dataclasses import MISSING, dataclass

from regtopk.core.options import check_options, option, within


@dataclass(frozen=True)
class Link:
    """time_s = compute_s + rounds · latency_s + 8 · bytes / bandwidth.

    Args:
        bandwidth: bits per second, > 0.
        latency_s: seconds a round of messages takes before the first byte, >= 0.
        compute_s: seconds of a step that are not communication, >= 0.
    """

    bandwidth: float = option(MISSING, within("(0, inf]"))
    latency_s: float = option(0.0, within("[0, inf]"))
    compute_s: float = option(0.0, within("[0, inf]"))

    def __post_init__(self) -> None:
        check_options(self)

    def time_s(self, num_bytes: float, num_rounds: float) -> float:
        """Seconds of a step that moves so many bytes through a worker's interface in so many rounds."""
        return self.compute_s + num_rounds * self.latency_s + 8 * num_bytes / self.bandwidth
