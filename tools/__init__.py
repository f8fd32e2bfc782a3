"""Command-line tools that reproduce the built-in model; the engine never imports them."""
