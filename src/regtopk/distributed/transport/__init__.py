"""How bytes reach the other ranks: collectives of torch.distributed, and messages of any length."""
