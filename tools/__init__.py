"""Command-line tools for developers, most of which make the built-in model. The engine never imports them."""
