"""llama.cpp as a whole process: `python -m benchmarks.peers.llama_first_token MODEL PROMPT` prints the next token.

It does the same as `cli.py generate --max-tokens 1`: load, tokenise, prefill, choose a token, print it.
"""

from __future__ import annotations

import os
import sys

from benchmarks.peers.llama import Llama

# llama.cpp's own default.
CONTEXT = 512


def main(model: str, prompt: str) -> None:
    """Write the next token to stdout as bytes: a token need not be a whole character."""
    llama = Llama(model, context=CONTEXT)
    os.write(1, llama.piece(llama.read(llama.encode(prompt))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
