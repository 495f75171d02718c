"""Training by real processes on this machine: `regtopk train`."""
