"""What is trained in the race of the GPT, how far, and with which learning rates: written down before it is run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One size of the race.

    Args:
        num_layers, width, context: of the GPT.
        batch_size: windows of a rank and step.
        target: the test loss that all must reach, in nats per character.
        losses: above it, that the table shows on the way.
        lrs: that all methods try, on the seed `search_seed`; runs that count are on `claim_seed`.
        most_steps: of a run, a multiple of `stretch`.
        stretch: steps from one evaluation to the next: whole rounds of every method.
        num_tested: windows of the test.
        warm_up: first steps, in which the learning rate rises. PowerSGD sends dense gradients meanwhile.
        link, slow_link: bits per second, of the race and of the steps that are measured for the other table.
        slow_seconds: about how long a method's steps are measured on the slow link.
        latency_s: one way, of the links where latency is measured; `latency_batch_size` makes a local step of
            the length that training on such links has.
        latency_stretches: how many stretches are measured with latency, and without.
    """

    num_layers: int = 4
    width: int = 256
    context: int = 32
    batch_size: int = 1
    target: float = 2.6
    losses: tuple[float, ...] = (3.2, 3.0, 2.8)
    lrs: tuple[float, ...] = (0.002, 0.001, 0.004, 0.008)
    most_steps: int = 512
    stretch: int = 16
    num_tested: int = 128
    warm_up: int = 32
    search_seed: int = 0
    claim_seed: int = 1
    link: float = 100e6
    slow_link: float = 10e6
    slow_seconds: float = 40.0
    latency_s: float = 0.05
    latency_batch_size: int = 8
    latency_stretches: int = 4


FULL = Plan()
QUICK = Plan(
    num_layers=2,
    width=64,
    target=3.9,
    losses=(4.2,),
    lrs=(0.004,),
    most_steps=48,
    num_tested=16,
    warm_up=8,
    slow_seconds=1.0,
    latency_batch_size=1,
    latency_stretches=1,
)
