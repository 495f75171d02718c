"""How bytes reach the other ranks: collectives of torch.distributed, and threads that wait for them."""
