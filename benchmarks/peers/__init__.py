"""Other engines on the same model file, measured by one and the same loop.

`python -m benchmarks.peers` runs `plan.py`'s contests. Every contestant is a process of its own, started with the
interpreter that has its package (`engines.py`); what it is asked and what it answers are lines of JSON (`child.py` is
their end, `process.py` is ours). In each round of `rounds.py` every contestant runs once, so that a machine that slows
down slows all of them. `start.py` times whole processes, `exact.py` compares logits, `section.py` writes the page.
`python -m benchmarks.peers.folders` does the same for Hugging Face folders, beside transformers alone.

One file per engine says how it reads tokens: `ours.py`, `llama.py`, `transformers_f32.py`, `mlx_8bit.py`.
"""
