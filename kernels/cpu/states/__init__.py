"""Mixers with a state: short convolutions and the gated delta rule."""
