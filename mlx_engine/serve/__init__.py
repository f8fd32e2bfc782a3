"""The HTTP server: the API of OpenAI over one engine thread, and a page that shows what the engine does."""
