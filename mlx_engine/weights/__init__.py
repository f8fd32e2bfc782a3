"""From the tensors of a file to the parameters of a model."""
