"""Write model files: quantised GGUF files, Hugging Face folders as GGUF, folders for MLX; and verify a checkpoint."""
