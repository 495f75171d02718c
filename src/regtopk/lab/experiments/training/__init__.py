"""Models of several seeds, trained in the simulator by one method."""
