"""Exchanges of updates: what optimizers changed in a round of local steps."""
