"""What a rank keeps: the model as flat vectors, the state of the algorithm for each, saved and loaded."""
