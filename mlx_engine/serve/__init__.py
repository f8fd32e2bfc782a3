"""The HTTP server: the APIs of OpenAI and Anthropic, and a page with a chat and a live view of the engine."""
