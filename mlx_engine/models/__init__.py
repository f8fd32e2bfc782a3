"""The architectures, a file for each or for those of a family, and what they share: `layer.py` and `decoder.py`."""
