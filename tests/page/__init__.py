"""The page in a real browser: `python -m tests.page` takes screenshots and checks that it can be used by everybody."""
