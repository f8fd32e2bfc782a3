"""The architectures, one file each, and what they share: `decoder.py`."""
