"""The Triton programs: what runs on the GPU."""
