"""Model files, one per architecture or family. `layer.py` and `decoder.py` have what all models share."""
