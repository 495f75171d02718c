"""What is trained in the race of the GPT, how far, with which learning rates: settled before it is run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """One size of the race.

    Args:
        num_layers, width, context: of the GPT.
        batch_size: windows of a rank and step.
        num_steps: of a run; the learning rate rises in the first `warm_up` steps, and falls linearly to zero.
            PowerSGD sends dense gradients during the warm-up.
        target: the test loss that all must reach, in nats per character.
        losses: above it, that a table shows too.
        lrs: that all methods try on `search_seed`, in `search_steps` steps.
        claim_seeds: of what counts.
        stretch: steps from one evaluation to the next in the race: whole rounds of every method.
        num_tested: windows of the test.
        link, slow_link: bits per second.
        seconds: for which a method's steps are measured on a link, in at least 2 rounds and at most 8.
        latency_s: one way, of the links where latency is measured.
        latency_batch_size: windows of a rank and step there.
        latency_stretches: how many, of 4 rounds each, are measured with latency, and without.
    """

    num_layers: int = 2
    width: int = 384
    context: int = 32
    batch_size: int = 1
    num_steps: int = 640
    warm_up: int = 64
    target: float = 2.6
    losses: tuple[float, ...] = (2.9, 2.8, 2.7)
    lrs: tuple[float, ...] = (0.0005, 0.001, 0.002)
    search_steps: int = 256
    search_seed: int = 0
    claim_seeds: tuple[int, ...] = (1, 2, 3)
    stretch: int = 32
    num_tested: int = 128
    link: float = 100e6
    slow_link: float = 10e6
    seconds: float = 25.0
    latency_s: float = 0.05
    latency_batch_size: int = 20
    latency_stretches: int = 4


FULL = Plan()
QUICK = Plan(
    width=64,
    num_steps=32,
    warm_up=8,
    target=3.6,
    losses=(4.0,),
    lrs=(0.004,),
    claim_seeds=(1, 2),
    search_steps=16,
    stretch=16,
    num_tested=16,
    seconds=0.5,
    latency_batch_size=1,
    latency_stretches=2,
)
