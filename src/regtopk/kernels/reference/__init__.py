"""Plain torch: the readable kernels, and the oracle of every fast one."""
