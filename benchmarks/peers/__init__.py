"""Measure other engines (peers) and this one on the same model file, by the same loop.

`python -m benchmarks.peers` runs the contests of `contests.py`. Every contestant has its own process, started with the
interpreter that has its package. Requests and replies are lines of JSON (`child.py` in the engine's process,
`process.py` in this one). `start.py` times whole processes, `exact.py` compares logits.
`python -m benchmarks.peers.folders` measures Hugging Face folders in transformers and here.

One file per engine implements the interfaces of `loop.py`: `ours.py`, `llama.py`, `openvino.py`,
`transformers_f32.py`, `mlx_8bit.py`.
"""
