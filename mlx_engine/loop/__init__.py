"""The generation loop: a scheduler forms batches of requests, a model runner computes them, outputs get the tokens."""
