import torch
from torch import Tensor

from regtopk import SparseLoCo
from regtopk.core import Layout
from regtopk.simulate import Cluster

MATRIX, VECTOR = (128, 64), (128,)
LAYOUT = Layout.of_shapes([("matrix", MATRIX, "linear"), ("bias", VECTOR, "bias")])
NUM_WORKERS, K = 3, 128


def as_the_authors(update: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """What one worker sends of one parameter, dense, and its residual: tiles of 64 x 64, runs of 64."""
    a = 0.95 * residual + update
    tiles = (
        a.unsqueeze(0).split(64, dim=1)
        if a.dim() == 1
        else [tile for rows in a.split(64, dim=0) for tile in rows.split(64, dim=1)]
    )
    for tile in tiles:
        k = max(1, round(tile.numel() * K / 4096))
        smallest = tile.abs().flatten().sort(descending=True).values[k - 1]
        tile[tile.abs() < smallest] = 0  # a view: what stays in `a` is sent
    return a, 0.95 * residual + update - a


def test_the_mean_over_senders_of_the_largest_of_each_tile() -> None:
    """The code's equations in plain loops over the parameters, values uncoded; weights are equal."""
    algorithm = SparseLoCo(density=K / 4096, value_code="float32")
    cluster = Cluster(algorithm, num_workers=NUM_WORKERS, layout=LAYOUT)
    residuals = [[torch.zeros(MATRIX), torch.zeros(VECTOR)] for _ in range(NUM_WORKERS)]
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(LAYOUT.numel, generator=generator)
    for _ in range(4):
        updates = common + torch.randn(NUM_WORKERS, LAYOUT.numel, generator=generator)
        sent = torch.zeros(NUM_WORKERS, LAYOUT.numel)
        for n, update in enumerate(updates):
            parts = [update[:8192].view(MATRIX), update[8192:]]
            found = [as_the_authors(*both) for both in zip(parts, residuals[n], strict=True)]
            residuals[n] = [residual for _, residual in found]
            sent[n] = torch.cat([part.flatten() for part, _ in found])
        num_senders = (sent != 0).sum(0)
        assert set(num_senders.tolist()) == {0, 1, 2, 3}
        expected = sent.sum(0) / num_senders.clamp(min=1)
        # a sum of three and a division, against thirds added up and divided by their weights
        torch.testing.assert_close(cluster.step(updates), expected, rtol=4 * 2**-24 * 3, atol=0)
        assert cluster.last_step.num_entries.tolist() == [2 * K + 2 * 2] * NUM_WORKERS
        assert cluster.state is not None
        kept = torch.stack([torch.cat([part.flatten() for part in parts]) for parts in residuals])
        torch.testing.assert_close(cluster.state.state_dict()["residual"], kept, rtol=0, atol=2**-22)
