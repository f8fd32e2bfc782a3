"""Products, and what is computed in the rows around them: norms, activations, experts."""
