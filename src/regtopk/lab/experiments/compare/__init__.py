"""Methods compared on one task, over seeds: `regtopk compare`."""
