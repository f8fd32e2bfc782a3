"""Text generation with a model: prefill, decode, sampling, stop conditions, metrics."""
