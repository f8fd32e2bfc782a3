"""Conversion of files: quantised GGUF files, Hugging Face folders as GGUF, and the verification of a checkpoint."""
