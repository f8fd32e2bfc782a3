"""Command-line tools that remake the built-in model; the engine itself never imports them."""
