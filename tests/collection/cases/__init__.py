"""The cases, a file per project."""
