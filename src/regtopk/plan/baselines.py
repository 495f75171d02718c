"""What is there without this library: DDP's buckets, and the factors of torch's PowerSGD."""

from math import ceil, prod

from regtopk.plan.workload import Workload

BUCKET_BYTES = 25 * 2**20  # DDP's default bucket_cap_mb
FIRST_BUCKET_BYTES = 2**20
POWERSGD_RANK = 2
POWERSGD_MIN_SAVING = 2  # torch's min_compression_rate: what saves less is sent as it is


def num_buckets(numel: int) -> int:
    """How many buckets DDP makes of float32 gradients: a first of 1 MiB, then 25 MiB each."""
    rest = 4 * numel - FIRST_BUCKET_BYTES
    return 1 + max(0, ceil(rest / BUCKET_BYTES))


def powersgd_bytes(workload: Workload) -> tuple[int, int, int]:
    """Bytes of the parameters PowerSGD leaves alone, of the left factors, and of the right factors."""
    alone = left = right = 0
    for shape in workload.shapes:
        size = prod(shape)
        rows = shape[0] if len(shape) > 1 else 1
        columns = size // rows if rows else 0
        rank = min(rows, columns, POWERSGD_RANK)
        if len(shape) > 1 and (rows + columns) * rank * POWERSGD_MIN_SAVING < size:
            left, right = left + 4 * rows * rank, right + 4 * columns * rank
        else:
            alone += 4 * size
    return alone, left, right
