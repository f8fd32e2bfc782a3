"""Kernels of token mixers with a state: short convolutions, the gated delta rule, the state space of Mamba2."""
