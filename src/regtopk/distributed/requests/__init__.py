"""How each request of an algorithm is answered by all ranks together, and what that is counted as."""
