"""Map the tensors of a checkpoint to the parameters of a model, and convert them on load."""
