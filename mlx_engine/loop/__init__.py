"""The generation loop: a scheduler chooses the tokens of each forward pass, and a model runner runs the pass."""
