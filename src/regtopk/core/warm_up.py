"""A density that falls during the first steps: a function of the step, for any algorithm's ``density``."""

from dataclasses import dataclass

from regtopk.core.options import check_integer, check_number


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """A density that falls from `start` by equal factors (Deep Gradient Compression, Section 3.4).

    S_t = start (density / start)^(i / num_stages) in stage i = floor(num_stages t / num_steps), then density

    From 0.25 to 0.001 in 4 stages, as the paper has it: 0.25, 0.063, 0.016, 0.004, 0.001.

    Args:
        density: k / J after the warm-up, in (0, 1].
        num_steps: steps that the warm-up takes, >= 1.
        start: k / J in its first stage, in (0, 1].
        num_stages: the number of its stages, >= 1.
    """

    density: float
    num_steps: int
    start: float = 0.25
    num_stages: int = 4

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("density", "start"):
            check_number(name, getattr(self, name), "in (0, 1]", lambda x: 0 < x <= 1)
        for name in ("num_steps", "num_stages"):
            check_integer(name, getattr(self, name), at_least=1)

    def __call__(self, step: int) -> float:
        """The density of a step."""
        if step >= self.num_steps:
            return self.density
        stage = self.num_stages * step // self.num_steps
        return float(self.start * (self.density / self.start) ** (stage / self.num_stages))
