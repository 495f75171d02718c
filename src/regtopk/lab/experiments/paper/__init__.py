"""The figures and examples of the paper: `regtopk reproduce`."""
