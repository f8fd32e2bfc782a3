"""Run llama.cpp for the benchmarks, through llama-cpp-python's C interface, so that only llama.cpp's work is timed.

llama.cpp's defaults are kept (batches of 2,048 tokens in micro-batches of 512, 16-bit KV cache), with three exceptions.
Flash attention and the number of threads are set, because their fastest values depend on the machine. With several
sequences, the KV cache has float32 on request. By default, each sequence has its own part of the KV cache. This is
faster than a unified cache, in which every sequence reads the cells of all sequences.

`python -m benchmarks.peers.llama MODEL PROMPT` prints the next token, as `cli.py generate --max-tokens 1` does: load,
tokenise, prefill, choose a token, print it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import llama_cpp as api
import numpy as np

from benchmarks.peers.loop import Answer, BatchPeer, Peer, Request, prompts

# llama.cpp's values of the setting; -1 lets llama.cpp choose.
FLASH_ATTENTION = {False: 0, True: 1, None: -1}
BATCH = 2048


def open_peer(request: Request) -> Peer | BatchPeer:
    """Load the file, for several sequences if the request has them."""
    if "n_sequences" in request:
        return LlamaBatch(request)
    return Llama(request["model"], context=request["context"], flash_attention=request.get("flash_attention"))


def opened(model: str, flash_attention: bool | None, **settings: int) -> tuple[Any, Any]:
    """Return the model of a file, and a context; settings that are not given have llama.cpp's defaults."""
    api.llama_log_set(ignore_log, None)
    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    made = api.llama_context_default_params()
    settings |= {"n_batch": BATCH, "flash_attn_type": FLASH_ATTENTION[flash_attention]}
    for name, value in settings.items():
        setattr(made, name, value)
    context = api.llama_init_from_model(loaded, made) if loaded else None
    if not context:
        raise RuntimeError(f"llama.cpp cannot load {model} with these settings")
    return loaded, context


def facts() -> Answer:
    """Return the wrapper's version, which determines llama.cpp's, and the instructions for which llama.cpp is built."""
    built_for = api.llama_print_system_info().decode()
    return {"versions": {"llama-cpp-python": metadata.version("llama-cpp-python")}, "built_for": built_for}


class Llama(Peer):
    """One model, one context."""

    def __init__(self, model: str, *, context: int, flash_attention: bool | None = None) -> None:
        self._model, self._context = opened(model, flash_attention, n_ctx=context)
        self._vocab = api.llama_model_get_vocab(self._model)
        self.n_vocab = api.llama_vocab_n_tokens(self._vocab)
        self.use_threads(None)

    def facts(self) -> Answer:
        """Return the versions, and the instructions for which llama.cpp is built."""
        return facts()

    def use_threads(self, n: int | None) -> None:
        """Set the number of threads for decode and for batches."""
        count = n or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
        api.llama_set_n_threads(self._context, count, count)

    def rewind(self, length: int) -> None:
        """Free the KV cells after `length`."""
        api.llama_memory_seq_rm(api.llama_get_memory(self._context), 0, length, -1)

    def read(self, ids: Sequence[int]) -> int:
        """Read ids in batches; llama.cpp computes logits of the last token of each batch only."""
        for first in range(0, len(ids), BATCH):
            part = ids[first : first + BATCH]
            # The name keeps the array alive: the batch has only its address.
            held = (api.llama_token * len(part))(*part)
            self._decode(api.llama_batch_get_one(held, len(part)))
        return int(np.argmax(self._row(-1)))

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits of all tokens, from one batch."""
        self.rewind(0)
        batch = api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        self._decode(batch)
        rows = np.stack([self._row(i).copy() for i in range(len(ids))])
        api.llama_batch_free(batch)
        return rows

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        raw = text.encode()
        out = (api.llama_token * (len(raw) + 8))()
        n = api.llama_tokenize(self._vocab, raw, len(raw), out, len(out), False, False)
        return [int(token) for token in out[:n]]

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token."""
        out = (ctypes.c_char * 256)()
        return out.raw[: api.llama_token_to_piece(self._vocab, token, out, len(out), 0, True)]

    def _decode(self, batch: Any) -> None:
        status = api.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {batch.n_tokens} tokens: expected status 0, found {status}")

    def _row(self, index: int) -> np.ndarray:
        row = np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, index), (self.n_vocab,))
        return np.asarray(row)


# At module level, because llama.cpp keeps only the address of the callback.
@api.llama_log_callback
def ignore_log(level: int, text: bytes, data: object) -> None:
    """Discard the log: llama.cpp prints many lines while it loads."""


# ggml's numbers of the types of the KV cache; the default is F16.
F32, F16 = 0, 1


class LlamaBatch(BatchPeer):
    """One model, and one context with several sequences."""

    def __init__(self, request: Request) -> None:
        n_sequences, self._depth, threads = request["n_sequences"], request["depth"], request["threads"]
        type_ = F32 if request.get("float32_cache") else F16
        self._model, self._context = opened(
            request["model"], request.get("flash_attention"), n_ctx=n_sequences * (self._depth + request["spare"]),
            n_seq_max=n_sequences, n_outputs_max=n_sequences, n_threads=threads, n_threads_batch=threads,
            type_k=type_, type_v=type_,
        )  # fmt: skip
        self._n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._first: list[int] = []
        for sequence, ids in enumerate(prompts(self._n_vocab, n_sequences, self._depth)):
            self._first += self._decode([(sequence, i, token) for i, token in enumerate(ids)], wanted=1)
        self._tokens, self._length = self._first, self._depth

    def facts(self) -> Answer:
        """Return the versions, and the instructions for which llama.cpp is built."""
        return facts()

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


# llama.cpp's own default.
CONTEXT = 512


def main(model: str, prompt: str) -> None:
    """Write the next token to stdout as bytes: a token need not be a whole character."""
    llama = Llama(model, context=CONTEXT)
    os.write(1, llama.piece(llama.read(llama.encode(prompt))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
