"""What methods are trained on: gradients of simulated workers, and how good a model is."""
