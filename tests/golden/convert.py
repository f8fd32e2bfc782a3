"""A folder of safetensors as a GGUF file, as llama.cpp's converter would write it.

Written with the gguf package and from llama.cpp's conventions alone: Conv1D turned round but q, k, v left together. It
shares no line with mlx_engine.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np

GPT2 = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def convert(folder: Path, path: Path, type_: str) -> None:
    """Write `path` with matrices of `type_`, "F32" or "Q8_0"; what a token is looked up by position stays F32."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "gpt2")
    _gpt2_settings(writer, config)
    for name, values in read_safetensors(folder / "model.safetensors").items():
        *stem, part = name.split(".")
        layer = [f"blk.{stem[2]}"] if stem[1] == "h" else []
        known = GPT2[".".join(stem[3:] if layer else stem)]
        if layer and values.ndim == 2:
            values = values.T
        _add(writer, ".".join([*layer, known, part]), values, type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, type_: str) -> None:
    values = np.ascontiguousarray(values, dtype=np.float32)
    if type_ == "F32" or values.ndim < 2 or name.startswith("position_embd"):
        writer.add_tensor(name, values)
        return
    kind = gguf.GGMLQuantizationType[type_]
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _gpt2_settings(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """float32 tensors by name."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[start:][slice(*row["data_offsets"])], "<f4").reshape(row["shape"])
        for name, row in header.items()
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """float32 tensors by name."""
    header, blob = {}, b""
    for name, values in tensors.items():
        data = np.ascontiguousarray(values, dtype="<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)
