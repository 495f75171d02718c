"""Top-k as other libraries send it: torch.topk of each bucket, int32 indices, float32 values, all_gather."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.futures import Future

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class PeerTopK:
    """The hook's state: a residual a bucket, begun anew when DDP makes its buckets anew."""

    def __init__(self, density: float) -> None:
        self.density = density
        self.num_workers = dist.get_world_size()
        self.residuals: dict[int, Tensor] = {}
        self.num_entries = 0  # sent by this rank in the current step

    def residual(self, bucket: GradBucket) -> Tensor:
        grad = bucket.buffer()
        known = self.residuals.get(bucket.index())
        if known is None or known.shape != grad.shape:
            known = self.residuals[bucket.index()] = torch.zeros_like(grad)
        return known

    def sent_bytes(self) -> int:
        """What a ring all_gather sends from each worker in a step, as 8 bytes an entry."""
        return (self.num_workers - 1) * 8 * self.num_entries


@torch.no_grad()
def peer_topk_hook(state: PeerTopK, bucket: GradBucket) -> Future[Tensor]:
    """sum_n s_n * (e_n + g_n) / N, and e_n := e_n + g_n where nothing was sent."""
    grad, residual = bucket.buffer(), state.residual(bucket).add_(bucket.buffer())
    k = max(1, int(state.density * grad.numel()))
    state.num_entries = k if bucket.index() == 0 else state.num_entries + k
    indices = torch.topk(residual.abs(), k, sorted=False).indices
    values = residual[indices]
    residual[indices] = 0
    all_indices = indices.new_empty(state.num_workers * k, dtype=torch.int32)
    all_values = values.new_empty(state.num_workers * k)
    gathering = [
        all_gather_single(all_indices, indices.to(torch.int32), async_op=True).get_future(),
        all_gather_single(all_values, values, async_op=True).get_future(),
    ]

    def add(_: object) -> Tensor:
        grad.zero_().index_add_(0, all_indices.long(), all_values.div_(state.num_workers))
        return grad

    return torch.futures.collect_all(gathering).then(add)
