"""Third-party clients against the server over real sockets: `python -m tests.clients` (extra `clients`)."""
