"""One model on several machines: processes that MLX's launcher has started, each with a part of the weights."""
