"""Exchanges of gradients: DistributedDataParallel, fully_shard, and a loop without either."""
