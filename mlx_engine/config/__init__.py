"""Settings of models: declare the fields of a config, and read and write them as GGUF metadata or config.json."""
