"""From a model to text: prefill, then one token at a time, choosing, stopping, measuring."""
