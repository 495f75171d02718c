"""What an exchange sent and how long it took, measured on the messages themselves."""

import time
from collections import Counter
from dataclasses import dataclass, replace

from regtopk.core.options import counted
from regtopk.core.timer import Timer
from regtopk.distributed.options import Writer
from regtopk.errors import log

LEAST_SHARE_TOLD = 0.05  # of the time: ranks that wait less for one another are not worth a line
PHASES = ("select_s", "encode_s", "collective_s", "decode_s")


@dataclass
class StepRecord:
    """One step, or the sum of many, of this rank.

    Bytes as in `regtopk.core.traffic`; times in seconds, split into preparing the vector and the algorithm's
    own work (select_s), encoding, waiting in collectives, and decoding, summing and writing back.
    residual_norm is that of what the rank has not sent, and of what it owes where sums come back in part.
    lost_residual is the sum of w_n |e_n| over the ranks n that were lost with their residuals.
    """

    payload_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    dense_bytes: int = 0
    num_entries: int = 0
    select_s: float = 0.0
    encode_s: float = 0.0
    collective_s: float = 0.0
    decode_s: float = 0.0
    residual_norm: float = 0.0
    num_skipped: int = 0
    lost_residual: float = 0.0

    def add(self, other: "StepRecord") -> None:
        """Add another record to this one; the residual's norm is the newer one's."""
        for name, number in other.as_dict().items():
            setattr(self, name, number + (0 if name == "residual_norm" else getattr(self, name)))

    def as_dict(self) -> dict[str, float]:
        """The numbers by name."""
        return dict(vars(self))


class Ledger:
    """What the steps of an exchange sent and how long they took."""

    def __init__(self, total: StepRecord | None = None, num_steps: int = 0, first_step: int = 0) -> None:
        self.num_steps = num_steps  # that `total` is of, skipped ones included
        self.first_step = first_step  # that it counts from; not 0 after a resume on other ranks
        self.waited_s = 0.0  # in collectives since the ledger was made, as far as timers were read
        self.waits: dict[int, float] = {}  # the same of every rank, as they told one another last
        self.num_clipped: Counter[int] = Counter()  # vectors of every rank that were scaled down since then
        self._began = self._ended = time.perf_counter()
        self._total = total or StepRecord()
        self._last_step = StepRecord()
        self._unread: list[tuple[StepRecord, Timer]] = []

    def add(self, record: StepRecord, timer: Timer) -> None:
        """Add a step; a timer on a GPU is read when somebody asks, or long after it has stopped."""
        self.num_steps += 1
        self._ended = time.perf_counter()
        self._last_step = record
        self.add_to_total(record, timer)

    def add_to_total(self, record: StepRecord, timer: Timer) -> None:
        """Add what belongs to a step that was counted before."""
        self._unread.append((record, timer))
        if not timer.is_cuda or len(self._unread) > 100:
            self._read()

    def lose(self, residual: float) -> None:
        """Count what ranks had not sent that are lost."""
        self._total.lost_residual += residual

    @property
    def last_step(self) -> StepRecord:
        """The newest step."""
        self._read()
        return replace(self._last_step)

    @property
    def total(self) -> StepRecord:
        """The sum of all steps."""
        self._read()
        return replace(self._total)

    def _read(self) -> None:
        for record, timer in self._unread:
            for phase, seconds in timer.seconds().items():
                setattr(record, phase, seconds)
            self._total.add(record)
            self.waited_s += record.collective_s
        self._unread = []

    def slowest(self) -> tuple[int, float]:
        """The rank that waited least, and for which share of the time the others waited longer than it."""
        elapsed = self._ended - self._began
        if len(self.waits) < 2 or elapsed <= 0:
            return 0, 0.0
        rank, least = min(self.waits.items(), key=lambda item: item[1])
        others = (sum(self.waits.values()) - least) / (len(self.waits) - 1)
        return rank, (others - least) / elapsed


def draw(writer: Writer, record: StepRecord, num_steps: int) -> Writer | None:
    """Give a step's numbers to a writer. The writer for the next step: its failure must not end training."""
    try:
        for name, number in record.as_dict().items():
            writer.add_scalar(f"regtopk/{name}", number, num_steps)
    except Exception as error:
        log.warning("the writer failed and gets no more numbers: %s: %s", type(error).__name__, error)
        return None
    return writer


def summarise(
    ledger: Ledger,
    num_workers: int,
    title: str,
    residual_norm: float,
    num_steps: int | None = None,
    num_parts: int = 1,
    peer: str = "rank",
    dense_step_bytes: int = 0,
) -> str:
    """A few lines of text: bytes sent and received, against dense, and where the time went.

    `num_steps` are the optimizer's, between which there were rounds of updates; None: each exchanged
    gradients. `num_parts` steps of the ledger make one of the whole model, and a dense step of the optimizer
    would move `dense_step_bytes`.
    """
    noun, vectors = ("step", "gradients") if num_steps is None else ("round", "updates")
    total, steps, first = ledger.total, max(ledger.num_steps, 1) / num_parts, ledger.first_step
    made = num_steps or steps  # the optimizer's
    if first and dense_step_bytes:  # those since: rounds that finish() ends may have fewer than others
        made = total.dense_bytes / dense_step_bytes or 1
    sent, received = (
        f"{_size(moved / made)} per step, {_size(moved)} in all"
        for moved in (total.sent_bytes, total.received_bytes)
    )
    dense = f"{_size(total.dense_bytes / made)} per step"
    if total.received_bytes:
        times = total.dense_bytes / total.received_bytes
        dense += f": a ring all_reduce of float32 would receive {times:.1f} times as much"
        dense += f", of bfloat16 {times / 2:.1f}"
    phases = [f"{name[:-2]} {1e3 * getattr(total, name) / steps:.2f}" for name in PHASES]
    done = counted((ledger.num_steps - total.num_skipped) // num_parts, noun)
    after = "" if num_steps is None else f"after {counted(num_steps, 'step')}, "
    since = f" since {noun} {first // num_parts}, when the ranks changed" if first else ""
    lines = [
        f"{title}: {after}{done} on {counted(num_workers, 'worker')}{since}; this rank:",
        f"  sent      {sent}; {total.num_entries / steps:.0f} entries per {noun}",
        f"  received  {received}",
        f"  dense     {dense}",
        f"  time      {' · '.join(phases)} ms per {noun};",
        "            collective includes waiting for the slowest rank",
        f"  residual  norm {residual_norm:.4g}",
    ]
    slow, share = ledger.slowest()
    if share >= LEAST_SHARE_TOLD:
        lines.append(f"  slowest   {peer} {slow} kept the others waiting for {100 * share:.0f} % of the time")
    for rank, number in sorted(ledger.num_clipped.items()):
        lines.append(f"  clipped   {counted(number, 'update')} of {peer} {rank}, by clip_norm")
    if total.lost_residual:
        norm = f"{total.lost_residual:.4g}"
        lines.append(f"  lost      weighted residuals of norm {norm}, with ranks that are gone")
    if total.num_skipped:
        lines.append(f"  skipped   {counted(total.num_skipped, noun)} whose {vectors} were not finite")
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while num_bytes >= 1000 and len(units) > 1:
        num_bytes /= 1000
        units.pop(0)
    return f"{num_bytes:.3g} {units[0]}"
