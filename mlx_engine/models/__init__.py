"""The architectures, one file each, and what they share: `layer.py` and `decoder.py`."""
