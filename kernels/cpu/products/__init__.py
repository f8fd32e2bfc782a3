"""Matrix products, with the norms and activations before and after them, and mixtures of experts."""
