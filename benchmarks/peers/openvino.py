"""Run OpenVINO on the CPU for the benchmarks, with a Qwen3 file's weights compressed by NNCF to 8 or 4 bits.

OpenVINO's defaults are kept: activations are rounded to 8 bits for products, other operations use the type that
OpenVINO chooses for the processor, and keys and values have 8 bits. The package `optimum-intel` converts the file to a
folder beside the file, once.

The exported model computes the logits of all tokens. As in OpenVINO GenAI, the model is changed to select the last
token's hidden state before the product with the head.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from openvino import opset15 as ops

from benchmarks.peers.hugging_face import open_qwen3
from benchmarks.peers.loop import Answer, Peer, Request
from benchmarks.peers.transformers_f32 import from_qwen3

GROUP = 32


def open_peer(request: Request) -> Peer:
    """Compress the weights of the file to `bits` bits, unless that is done, and compile the model."""
    return OpenVINO(compressed(Path(request["model"]), request["bits"]), request.get("properties", {}))


def compressed(path: Path, bits: int) -> Path:
    """Return the folder of the model, which is made if it is missing."""
    folder = path.with_name(f"{path.stem}-openvino-int{bits}")
    if not folder.exists():
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        from_qwen3(open_qwen3(path)).save_pretrained(part / "transformers")
        # For 8 bits, NNCF has one scale per row and no groups.
        groups = {} if bits == 8 else {"group_size": GROUP, "ratio": 1.0}
        config = OVWeightQuantizationConfig(bits=bits, sym=True, **groups)
        model = OVModelForCausalLM.from_pretrained(
            part / "transformers", export=True, compile=False, quantization_config=config
        )
        model.save_pretrained(part)
        shutil.rmtree(part / "transformers")
        part.rename(folder)
    return folder


class OpenVINO(Peer):
    """A stateful model: its keys and values are variables of the inference request."""

    def __init__(self, folder: Path, properties: dict[str, Any]) -> None:
        core = openvino.Core()
        self._model = core.read_model(folder / "openvino_model.xml")
        self._all = core.compile_model(self._model.clone(), "CPU", properties)
        last_token_alone(self._model)
        self._compiled = core.compile_model(self._model, "CPU", properties)
        self._request, self._length = self._compiled.create_infer_request(), 0
        self.n_vocab = int(self._model.output("logits").partial_shape[-1].get_length())

    def facts(self) -> Answer:
        """Return the versions, and the types with which OpenVINO computes."""
        found = {
            name: str(self._compiled.get_property(name))
            for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
        }
        versions = {name: metadata.version(name) for name in ("openvino", "optimum-intel", "nncf")}
        return {"versions": versions, "built_for": ", ".join(f"{name}={value}" for name, value in found.items())}

    def rewind(self, length: int) -> None:
        """Forget the sequence; OpenVINO cannot forget a part of it."""
        if length not in (0, self._length):
            raise ValueError(f"OpenVINO keeps all {self._length} tokens of the sequence or none, found {length}")
        if length == 0:
            self._request.reset_state()
            self._length = 0

    def read(self, ids: Sequence[int]) -> int:
        """Read ids; only the last token's logits are computed."""
        out = self._request.infer(self._inputs(ids, self._length))
        self._length += len(ids)
        return int(out["logits"][0, -1].argmax())

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of all tokens, in a request of its own."""
        return np.asarray(self._all.create_infer_request().infer(self._inputs(ids, 0))["logits"][0])

    def _inputs(self, ids: Sequence[int], begun: int) -> dict[str, np.ndarray]:
        end = begun + len(ids)
        made: dict[str, np.ndarray] = {
            "input_ids": np.array([list(ids)], np.int64),
            "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(begun, end, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        names = {name for given in self._model.inputs for name in given.names}
        return {name: array for name, array in made.items() if name in names}


def last_token_alone(model: Any) -> None:
    """Change a model so that its head multiplies the last token's hidden state alone."""
    node = model.output("logits").get_node()
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    ends = [np.array([value], np.int64) for value in (-1, np.iinfo(np.int64).max, 1, 1)]
    hidden = ops.slice(node.input_value(0), *(ops.constant(end) for end in ends))
    node.input(0).replace_source_output(hidden.output(0))
    model.validate_nodes_and_infer_types()
