"""Many workers in one process: the same algorithms, answered over the batch dimension."""

from regtopk.simulate.cluster import Cluster

__all__ = ["Cluster"]
