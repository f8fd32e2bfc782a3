"""llama.cpp's batched decode through llama-cpp-python's C interface: one token of every sequence per `llama_decode`.

Each sequence has its own part of the KV cache, which is llama.cpp's default and its faster arrangement: in a unified
cache every sequence reads the cells of all.
"""

from __future__ import annotations

from importlib import metadata

import llama_cpp as api
import numpy as np

from benchmarks.peers.batches import BatchPeer, prompts
from benchmarks.peers.llama import BATCH, FLASH_ATTENTION, ignore_log
from benchmarks.peers.loop import Answer, Request

# ggml's numbers of the types of the KV cache; the default is F16.
F32, F16 = 0, 1


def open_peer(request: Request) -> BatchPeer:
    """Load the file."""
    return LlamaBatch(request)


class LlamaBatch(BatchPeer):
    """One model, and one context with several sequences."""

    def __init__(self, request: Request) -> None:
        api.llama_log_set(ignore_log, None)
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(request["model"].encode(), api.llama_model_default_params())
        n_sequences, self._depth = request["n_sequences"], request["depth"]
        settings = api.llama_context_default_params()
        settings.n_ctx, settings.n_batch = n_sequences * (self._depth + request["spare"]), BATCH
        settings.n_seq_max = settings.n_outputs_max = n_sequences
        settings.n_threads = settings.n_threads_batch = request["threads"]
        settings.flash_attn_type = FLASH_ATTENTION[request.get("flash_attention")]
        settings.type_k = settings.type_v = F32 if request.get("float32_cache") else F16
        self._context = api.llama_init_from_model(self._model, settings) if self._model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {request['model']} with these settings")
        self._n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._first: list[int] = []
        for sequence, ids in enumerate(prompts(self._n_vocab, n_sequences, self._depth)):
            self._first += self._decode([(sequence, i, token) for i, token in enumerate(ids)], wanted=1)
        self._tokens, self._length = self._first, self._depth

    def facts(self) -> Answer:
        """Return the wrapper's version, which determines the version of llama.cpp."""
        built_for = api.llama_print_system_info().decode()
        return {"versions": {"llama-cpp-python": metadata.version("llama-cpp-python")}, "built_for": built_for}

    def begin(self, n_sequences: int, n_steps: int) -> None:
        """Free the KV cells after the prompts."""
        for sequence in range(len(self._first)):
            api.llama_memory_seq_rm(self._memory, sequence, self._depth, -1)
        self._tokens, self._length = self._first[:n_sequences], self._depth

    def step(self) -> None:
        """Decode one token of every sequence and choose the next ones."""
        rows = [(sequence, self._length, token) for sequence, token in enumerate(self._tokens)]
        self._tokens = self._decode(rows, wanted=len(rows))
        self._length += 1

    def _decode(self, rows: list[tuple[int, int, int]], wanted: int) -> list[int]:
        """Decode rows (sequence, position, token), and return the most likely tokens after the last `wanted` rows."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (sequence, position, token) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, int(i >= len(rows) - wanted)
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {len(rows)} tokens: expected status 0, found {status}")
        logits = [api.llama_get_logits_ith(self._context, i) for i in range(len(rows) - wanted, len(rows))]
        return [int(np.argmax(np.ctypeslib.as_array(row, (self._n_vocab,)))) for row in logits]
