"""Sharded nets, and the meshes of four ranks that the tests of sharded models run on."""

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import regtopk
from tests.distributed.training import Net, make_net, whole

UNITS = ("first", "extra", "middle", "<root>")  # the last layer, of 3 x 20, is the root's own
GRIDS = [(2, 2), (4, 1)]


@cache
def grid(replicas: int, shards: int) -> DeviceMesh:
    """The four ranks as replicas and shards, made once in a process."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))


def replica() -> int:
    """Which replica of 2 x 2 this rank has a part of."""
    return dist.get_rank() // 2


def sharded(mesh: DeviceMesh, net: Net | None = None, **options: Any) -> Any:
    """A net sharded over a mesh, in four units of very different size."""
    net = make_net() if net is None else net
    for part in (net.first, net.extra, net.middle):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def attached(algorithm: Any, net: Net | None = None, **options: Any) -> tuple[Any, Any]:
    """A net on two replicas of two shards, and its exchange of gradients."""
    model = sharded(grid(2, 2)["shard"], net)
    return model, regtopk.attach(model, algorithm, process_group=grid(2, 2)["replicate"], **options)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(20, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            x = x + torch.tanh(self.middle(x))
        result: Tensor = self.last(x)
        return result


def used_twice(mesh: DeviceMesh) -> Any:
    """A sharded net with a unit that a forward uses twice, and a backward reduces once."""
    torch.manual_seed(0)
    net = Twice()
    fully_shard(net.middle, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def whole_parameters(model: nn.Module) -> Tensor:
    """All parameters as one vector, the parts of other ranks too."""
    model.reshard()  # type: ignore[operator]
    return torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
