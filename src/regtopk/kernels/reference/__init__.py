"""The readable kernels in plain torch: the oracle of every fast one."""
