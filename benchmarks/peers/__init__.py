"""Other engines on the same model file, measured by the same loop.

`python -m benchmarks.peers` runs the contests of `plan.py`. Every contestant has its own process, started with the
interpreter that has its package (`engines.py`). Requests and replies are lines of JSON (`child.py` in the engine's
process, `process.py` in this one). In each round of `rounds.py` every contestant runs once, so that a machine that
slows down slows all of them. `start.py` times whole processes, `exact.py` compares logits, `section.py` writes the
section of BENCHMARKS.md. `python -m benchmarks.peers.folders` measures Hugging Face folders beside transformers.

One file per engine implements `Peer`: `ours.py`, `llama.py`, `transformers_f32.py`, `mlx_8bit.py`.
"""
