"""Settings of models: declared fields, and how GGUF files and config.json name them."""
