"""Load a model, get logits, generate text: the public interface.

`load` finds a model's files, checks them (`open_source`), reads the weights and returns an `Engine`. An engine makes
requests from prompts (`RequestBuilder`) and runs them on a `Scheduler` (`loop/scheduler.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, cast

import numpy as np

from mlx_engine.backends import EXACT, check_backend, create_backend, kv_type_of
from mlx_engine.backends.base import Backend
from mlx_engine.backends.observed import watched
from mlx_engine.cache import KVPool, SequenceInput
from mlx_engine.cache.disk import (
    DEFAULT_NBYTES,
    DiskPrefixes,
    PrefixFolder,
    SavedPrefixes,
    Saver,
    backend_identity,
    identity_of,
    source_digest,
)
from mlx_engine.cache.pool import pool_nbytes, tokens_that_fit
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.checkpoint.identity import kept_digest, signature
from mlx_engine.checkpoint.model_files import Checkpoint
from mlx_engine.checkpoint.pooling import read_pooling
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.config.rope import context_notes
from mlx_engine.constraint import Constraint
from mlx_engine.errors import (
    ClosedError,
    ContextLengthError,
    ModelError,
    NotCopyableError,
    OptionError,
    is_whole,
    listed,
    out_of_memory,
    shown,
)
from mlx_engine.kernels.cached import cached_property
from mlx_engine.kernels.files import cache_folder
from mlx_engine.kernels.files import draft as new_file
from mlx_engine.loop.constraint import Grammars, Matcher, Reasoning
from mlx_engine.loop.forward import check_logits, forward_logits
from mlx_engine.loop.memory import Traffic, pool_for, spare_bytes
from mlx_engine.loop.metrics import Metrics
from mlx_engine.loop.output import NoText, Output
from mlx_engine.loop.request import Request
from mlx_engine.loop.row_reader import LastLogits, PooledHidden, PromptLogprobs, RowReader
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.loop.speculation import MOST_STATES, PassDrafter, Speculation, use_of
from mlx_engine.loop.stream import Generation, Progress, Stream, drained, outcome
from mlx_engine.machine.forks import kept_over_forks
from mlx_engine.machine.memory import available_memory, bounded_threads, give_back_freed
from mlx_engine.observe import log
from mlx_engine.options import (
    AUTO_SPECULATION,
    DEFAULT_MAX_TOKENS,
    DRAFT,
    LOOKUP,
    MTP,
    OFF,
    UNTIL_FULL,
    BatchOptionValues,
    Options,
    OptionValues,
    check_speculate,
    names_options,
    one_per_prompt,
    shows_options,
)
from mlx_engine.weights.adapters import Adapters, named, open_adapters, refuse
from mlx_engine.weights.conversion import AUTO, KEEP, Conversion, check_load_options
from mlx_engine.weights.model import (
    ExtraLayer,
    Loaded,
    Model,
    ModelConfig,
    Planned,
    check_allowed,
    open_model,
    plan_model,
)
from mlx_engine.weights.outline import expansions, need_of, outlined

if TYPE_CHECKING:
    import mlx.core as mx
    from typing_extensions import Unpack

    from mlx_engine.chat import Answer
    from mlx_engine.conversation.functions import Tool
    from mlx_engine.distributed.shard import Shard
    from mlx_engine.loop.stream import AsyncStream
    from mlx_engine.research import Session, Tap, TextChoice
    from mlx_engine.tokenizer import Tokenizer
    from mlx_engine.tokenizer.chat import History
    from mlx_engine.tokenizer.chat_prompt import ChatPrompt, Message

# Text, token ids, messages, or messages with tools, documents and variables of the template.
Prompt: TypeAlias = "str | Sequence[int] | Sequence[Message] | ChatPrompt"

Self = TypeVar("Self", bound="Engine")

# The largest number of answers in one pass of `generate_batch`, unless a single request has more answers.
BATCH_SLOTS = 32
# The values that `hidden_states` returns by default.
LAYER_OUTPUTS = ("embed", "blk.*.layer_out")
# The memory for keys and values is divided among a model and its drafters. Each gets a share in proportion to the bytes
# of its keys and values for this number of tokens.
COMPARED = 4096
# A model with fewer parameters is loaded without a check of the free memory.
FEW_PARAMETERS = 1 << 26


@names_options
def load(
    source: str | Path = "builtin",
    backend: str = "auto",
    quant: str = KEEP,
    threads: int | None = None,
    *,
    quant_min_dim: int | str = AUTO,
    quant_layers: Mapping[str, str] | None = None,
    allow_settings: Sequence[str] = (),
    jit: bool = True,
    context: int | None = None,
    activations: str = EXACT,
    kv_type: str | None = None,
    speculate: str = AUTO_SPECULATION,
    draft: str | Path | None = None,
    allow_too_large: bool = False,
    experts_memory: int | None = None,
    prefix_dir: str | Path | None = None,
    prefix_disk: int = DEFAULT_NBYTES,
    adapters: Sequence[str | Path] | Mapping[str, str | Path] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load a model.

    Args:
        source: a GGUF file, a Hugging Face folder, a hub id "org/repo[:file or type]", "builtin", or "shape:NAME",
            which writes a model of this shape with random weights.
        backend: a name that the `backends` command lists, or "auto" for the fastest on this machine.
        quant: "keep" keeps the types of the file, except that types without a kernel are expanded to floats; "f32",
            "q8_0", "q4_0", "q4_1" convert the linear layers.
        threads: number of threads of a CPU backend. None uses all cores that this process may use. A larger number is
            reduced to the number of these cores, with a warning.
        quant_min_dim: layers whose longer dimension is below this number are not quantised, unless `quant_layers` names
            them. "auto" is 32, which excludes no layer: rows that do not fill blocks of 32 are never quantised.
        quant_layers: maps GGUF names of layers, or the groups "attention", "mixer", "ffn" and "per_layer", to types
            that override `quant`, such as {"attn_v": "f32", "ffn": "q4_0", "output": "keep"}.
        allow_settings: names of settings that are ignored if they are not implemented. Results may then be wrong; the
            engine's `notes` list the ignored settings. Write nested settings with dots: "rope_scaling.factor".
        jit: use compiled CPU kernels if they are available. False uses NumPy instead.
        context: the length in tokens for which RoPE frequencies are chosen; used only by models with LongRoPE or
            dynamic NTK. Default: for LongRoPE the context length of the training, otherwise the model's context length.
        activations: the type of activations. "f32" is exact. "i16" (compiled CPU kernels), "f16" and "bf16" (backends
            that use MLX) are faster, but round: see docs/precision.md.
        kv_type: the type of keys and values in the cache: "f32", "f16", "bf16" or "q8_0". Default: "f16" or "bf16" if
            the activations have this type, else "f32", which is exact. "f16" and "bf16" take half of the memory of
            "f32", and "q8_0" takes about a quarter.
        speculate: the source of proposed tokens, which are verified in forward passes: "lookup" (earlier text), "draft"
            (the draft model), "mtp" (the model's own layer for multi-token prediction), "auto" (all that are available
            and worth their time) or "off". No source changes an answer if the backend computes the same bits in every
            batch, see docs/speculation.md.
        draft: the source of a draft model: a small model with the same vocabulary.
        allow_too_large: load a model even if it needs more memory than is free.
        experts_memory: the largest number of bytes of experts in memory. All other experts are read from the file when
            a token chooses them. None keeps all experts in memory if they fit. If not, CPU backends with compiled
            kernels keep as many experts of a GGUF file as fit.
        prefix_dir: a folder for the keys and values of prompts, which later runs of the same model reuse, see
            docs/prefixes.md. None keeps no prefixes on disk.
        prefix_disk: the largest number of bytes in `prefix_dir`; beyond it, the least recently used files are removed.
        adapters: folders of LoRA adapters that PEFT or mlx-lm has written, such as ["style"] or {"style": "runs/7"}.
            A run chooses an adapter by its name with the option `adapter`. The first adapter is the default, and "base"
            runs the model without an adapter.
        progress: called with (tensors prepared, tensors in total); for a "shape:" source, also while the file is
            written.

    Raises:
        OptionError: an option is invalid, or the model or the backend does not support it.
        BackendUnavailableError: this machine cannot run the backend.
        SourceError, FormatError, ModelError: the model cannot be found, read or built.
        NotEnoughMemoryError: the model needs more memory than is free.
    """
    options: dict[str, Any] = {"quant_min_dim": quant_min_dim, "quant_layers": quant_layers, "context": context}
    options |= {"allow_settings": allow_settings, "jit": jit, "progress": progress}
    options |= {"allow_too_large": allow_too_large, "activations": activations, "kv_type": kv_type}
    options |= {"speculate": speculate, "draft": draft, "adapters": adapters, "experts_memory": experts_memory}
    opened = open_source(source, backend, quant, threads, **options)
    longest: int = opened.config.context_length
    if context is not None and context > longest:
        expected = f"at most the model's context length of {longest:,}"
        raise OptionError(
            f"context must be {expected}, not {context:,}", option="context", expected=expected, found=context
        )
    engine = Engine(opened, progress)
    if prefix_dir is not None:
        engine.keep_prefixes(prefix_dir, prefix_disk)
    return engine


class Engine:
    """A model on a backend, with its tokenizer. Made by `load`; `with load(...) as engine:` closes it at the end.

    Attributes:
        path: the file or folder of the model.
        notes: lines for the user about how the model was loaded.
        architecture: the checkpoint's architecture.
        n_tensors, n_parameters: numbers of the model's tensors and parameters.
        speculation: whether tokens are proposed by default, by which drafters, and why.
        drafters: the names of the loaded drafters that run a model or a layer: "mtp", "draft", both or none.
        proposals: the newest `Speculation` that was made for a scheduler; None if no scheduler has used speculation.
    """

    def __init__(self, opened: CheckedCheckpoint, progress: Progress | None = None) -> None:
        """Load the weights of a checked checkpoint."""
        model, converted = opened.build(progress)
        planned = opened.planned
        self.architecture = opened.checkpoint.architecture
        self.n_tensors, self.n_parameters = len(planned.tensors), planned.n_parameters
        about = f"{self.architecture}, {self.n_parameters / 1e6:,.1f}M parameters, {converted.weights}"
        self._model: Model | None = model
        self._taps: list[Tap] | None = None
        self._prefixes: SavedPrefixes | None = None
        how = {"config": repr(opened.config), "conversion": str(planned.conversion), "layers": repr(model.kv_layers)}
        self._identified = {key: hashlib.sha256(text.encode()).hexdigest() for key, text in how.items()}
        self.path, self._about, self._prompts = opened.path, about, opened.prompts
        self._files = opened.files
        self._draft = opened.draft
        # The estimated time of the MTP layer and its head, relative to a pass of the model: the ratio of the numbers
        # of parameters.
        n_head = 0 if model.extra is None else model.extra.n_vocabulary * self.config.hidden_size
        self._extra_share = (planned.n_extra + n_head) / self.n_parameters
        self.drafters = (*(() if model.extra is None else (MTP,)), *(() if opened.draft is None else (DRAFT,)))
        self.speculation = use_of(model, opened.speculate, self.n_parameters, self.drafters)
        self.proposals: Speculation | None = None
        shared = () if opened.shard is None else opened.shard.notes
        notes = opened.checkpoint.notes, converted.notes(), context_notes(model.config), shared
        self.notes = tuple(note for some in notes for note in some)

    @property
    def model(self) -> Model:
        """The model; raise ClosedError if the engine has been closed."""
        if self._model is None:
            raise ClosedError
        return self._model

    def close(self) -> None:
        """Wait for a running forward pass, free the weights and the file, and end the backend's threads.

        Later calls, also on existing streams and schedulers, raise ClosedError.
        """
        if self._prefixes is not None:
            self._prefixes.close()
        model, self._model, self._draft = self._model, None, None
        if model is not None:
            model.backend.close()
        self._prompts.close()

    def keep_prefixes(self, folder: str | Path, max_nbytes: int = DEFAULT_NBYTES) -> None:
        """Keep the keys and values of prompts in a folder, for schedulers made after this call and for later runs.

        Raises:
            OptionError: several processes share the model, the model has adapters, the backend is `scalar`, or
                `max_nbytes` is not a whole number of at least 0.
        """
        be = self.model.backend
        self.check_kept("prefix_dir")
        if not is_whole(max_nbytes) or max_nbytes < 0:
            message = f"prefix_disk must be a number of bytes, not {shown(max_nbytes)}"
            raise OptionError(message, option="prefix_disk", expected="at least 0", found=max_nbytes)
        about = {**self._identified, **backend_identity(be)}
        identify = partial(_identified, self.path, about, self._files)
        made = PrefixFolder(Path(folder).expanduser(), max_nbytes, self.path.stem, identify)
        if self._prefixes is not None:
            # `made` computes its identity in a thread. If `load_prefix` has added entries to `self._prefixes.saved`,
            # `self._prefixes` has the same identity already. If not, its identity may be empty, so it is not copied.
            if self._prefixes.saved:
                made.identity, made.saved = self._prefixes.identity, self._prefixes.saved
            self._prefixes.close()
        self._prefixes = made

    def prefix_identity(self) -> bytes:
        """Return a digest of everything that determines keys and values, except the token ids.

        These are the model, the types of weights, activations and cache, and the source code, which fixes the order of
        sums.

        Raises:
            OptionError: keys and values of this model cannot be saved.
            SourceError: the model's files have changed since they were loaded.
        """
        self.check_kept("a file of keys and values")
        about = {**self._identified, **backend_identity(self.backend)}
        return identity_of(_identified(self.path, about, self._files, cache_folder("prefixes")))[1]

    def save_prefix(self, path: str | Path, prompt: Prompt, *, scheduler: Scheduler | None = None) -> int:
        """Write the keys and values of a prompt to a file for `load_prefix`, and return the number of saved tokens.

        Only whole pages of 64 tokens are saved. An existing file is replaced when the new file is complete. The text of
        the prompt can be recovered from the file. `scheduler` is a scheduler with a prefix cache that has run this
        prompt, or a longer prompt that begins with this one; None runs the prompt in this call.

        Raises:
            OptionError: keys and values of this model cannot be saved, or the scheduler has no prefix cache.
            SourceError: the model's files have changed since they were loaded.
            ContextLengthError, ChatTemplateError: the prompt cannot be run.
            OSError: the file cannot be written.
        """
        identity, ids = self.prefix_identity(), np.array(self.prompts.ids(prompt), dtype=np.int64)
        if scheduler is None:
            request = self.request(ids.tolist(), Options(0))
            scheduler = self.scheduler_for([request], keeps=True)
            drained(Stream(scheduler, request))
        prefix, path = scheduler.prefix, Path(path)
        if prefix is None:
            message = "save_prefix needs a scheduler with a prefix cache"
            raise OptionError(message, option="scheduler", expected="a prefix cache")
        with new_file(path) as new:
            with new.open("wb", buffering=0) as file:
                new.chmod(0o600)
                saver = Saver(file, DiskPrefixes(scheduler.pool, SavedPrefixes(identity)), identity, ids)
                prefix.save(saver, ids)
            new.replace(path)
        return saver.n_pages * scheduler.pool.page

    def load_prefix(self, path: str | Path) -> list[int]:
        """Use the keys and values of a file that `save_prefix` has written; return the token ids of the saved prompt.

        Schedulers made after this call reuse the keys and values if a prompt begins with the same ids. On backends with
        a fixed order of sums (docs/exactness.md), answers are bit-identical to those without the file. Damaged pages
        are computed again.

        Raises:
            FormatError: `save_prefix` has not written this file, or has written it for another model, version or type
                of keys and values.
            OptionError: keys and values of this model cannot be saved.
            SourceError: the model's files have changed since they were loaded.
            OSError: the file cannot be read.
        """
        identity = self.prefix_identity()
        self._prefixes = self._prefixes or SavedPrefixes(identity)
        return self._prefixes.add(Path(path), identity)

    def check_kept(self, option: str) -> None:
        """Raise an OptionError that names `option` if keys and values of this model cannot be kept on disk."""
        has_adapters = self.prompts.adapters is not None
        if self.model.is_shared or has_adapters or self.backend.name == "scalar":
            whose = "a model that one process runs alone" if self.model.is_shared else "another backend than scalar"
            whose = "a model without adapters" if has_adapters else whose
            raise OptionError(f"{option} needs {whose}", option=option, expected=whose)

    @property
    def prompts(self) -> RequestBuilder:
        """The builder of requests from prompts; raise ClosedError if the engine has been closed."""
        _ = self.model
        return self._prompts

    @property
    def config(self) -> ModelConfig:
        """The model's config, see its file in `models/`."""
        return cast("ModelConfig", self.model.config)

    @property
    def backend(self) -> Backend:
        """The backend that runs the model."""
        return self.model.backend

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase of loading, included in the metrics of every run."""
        return self._prompts.phases

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use.

        Raises:
            TokenizerError: the checkpoint has no tokenizer, or it cannot be built.
            ClosedError: the engine has been closed.
        """
        return self.prompts.tokenizer

    def logits(self, ids: Sequence[int]) -> mx.array:
        """Return float32 logits (T, V) at every position of `ids`, computed in one pass.

        Raises:
            OptionError: `ids` is empty, or has an id that is not in the vocabulary.
            ContextLengthError: `ids` is longer than the context.
            NotFiniteError: logits are NaN or infinite; the error names the first value that is not finite.
        """
        import mlx.core as mx

        checked = self.prompts.checked(ids)
        self.prompts.fitting(len(checked) - 1, 1, None)
        with self.backend.session():
            new = SequenceInput(checked, self.model.scratch_kv(len(checked)), wanted=None)
            logits = forward_logits(self.model, new)
            check_logits(self.model, logits, checked)
            return mx.array(self.backend.host(logits))

    def logprobs(self, prompt: Prompt) -> mx.array:
        """Return float32 log-probabilities (n - 1,) of a prompt's n tokens except the first.

        The prompt is encoded as by `prompt_ids`, and run in chunks. Logits are dropped after each chunk.
        `generate(prompt, 0, prompt_logprobs=N)` also lists the N most likely tokens at each place.

        Raises:
            OptionError: the prompt is empty, or has an id that is not in the vocabulary.
            ContextLengthError: the prompt is longer than the context.
            NotFiniteError: logits are NaN or infinite.
        """
        import mlx.core as mx

        found = drained(self.run(prompt, Options(0, prompt_logprobs=0))).prompt_logprobs or []
        return mx.array([token.logprob for token in found], dtype=mx.float32)

    def embed(self, texts: str | Sequence[str | Sequence[int]], dimensions: int | None = None) -> mx.array:
        """Return the embeddings of n texts, float32 (n, D).

        On backends with a fixed order of sums (docs/exactness.md), a text has the same vector, bit for bit, alone and
        in a batch. The model's files define the pooling, whether vectors are normalised, and the token that ends a
        text. Without such files, a vector is the hidden state of the last token after the last norm, normalised to
        length 1. Token ids in `texts` are used unchanged. For models that are trained for shorter vectors, `dimensions`
        cuts each vector to its first elements; None keeps all elements.

        Raises:
            OptionError: a text is empty, or `dimensions` is out of range.
            ContextLengthError: a text is longer than the context.
            ModelError: the model's files ask for a step that is not implemented.
        """
        import mlx.core as mx

        given: Sequence[str | Sequence[int]] = [texts] if isinstance(texts, str) else texts
        requests = [self.prompts.embedding(text) for text in given]
        self.prompts.check_dimensions(dimensions)
        if not requests:
            return mx.zeros((0, dimensions or self.config.hidden_size), dtype=mx.float32)
        for stream in self.run_requests(requests):
            drained(stream)
        return mx.array(np.stack([self.prompts.vector(request, dimensions) for request in requests]))

    def rerank(self, query: str, documents: Sequence[str], *, instruction: str | None = None) -> list[float]:
        """Return the relevance of each document to a query, from 0 to 1, with a reranker model.

        The relevance is p("yes") / (p("yes") + p("no")) after the prompt of Qwen3-Reranker. The model's files may
        define another prompt and other labels. `instruction` describes for the model which documents are relevant; None
        uses Qwen's instruction for a web search.

        Raises:
            ModelError: the model's files do not say that it is a reranker.
            ContextLengthError: query and document are longer than the context.
        """
        requests = [self.prompts.reranking(query, document, instruction) for document in documents]
        for stream in self.run_requests(requests):
            drained(stream)
        return [self.prompts.relevance(request) for request in requests]

    def tap_names(self) -> list[Tap]:
        """Return name, shape and meaning of every named value of a forward pass, in the order of computation.

        Raises:
            ModelError: several processes share the model.
        """
        from mlx_engine.research import taps

        if self._taps is None:
            self._taps = taps(self.model)
        return list(self._taps)

    def hidden_states(self, prompt: Prompt, names: str | Sequence[str] = LAYER_OUTPUTS) -> dict[str, mx.array]:
        """Return intermediate values (T, ...) of all tokens of a prompt, float32, by name.

        The values are bit-identical to those in any other pass over the same tokens; docs/exactness.md and `observed`
        (`backends/observed.py`) describe the exceptions. Long prompts are run in chunks, so that only the KV cache and
        the results grow with the prompt. NaN and infinities are returned, too. `names` are names from `tap_names`,
        or patterns such as "blk.*.attn_out"; by default the input of the first layer and the output of every layer.

        Raises:
            OptionError: a name or pattern matches no value, or the prompt is empty.
            ContextLengthError, ChatTemplateError: the prompt cannot be run.
            ModelError: several processes share the model.
        """
        import mlx.core as mx

        from mlx_engine.research import hidden_states, matching

        ids = self.prompts.ids(prompt)
        self.prompts.fitting(len(ids) - 1, 1, None)
        chosen = matching(names, [tap.name for tap in self.tap_names()])
        return {name: mx.array(values) for name, values in hidden_states(self.model, ids, chosen).items()}

    def session(self, prompt: Prompt, *, slots: int = 4, n_tokens: int | None = None) -> Session:
        """Return a session that begins with a prompt: `session.logits(next_ids)` appends tokens and returns logits.

        Up to `slots` sessions (this one and its forks) share memory for `n_tokens` tokens; a token that sessions share
        counts once. By default, `n_tokens` is a full context, or less if this needs more than half of the free memory.

        Raises:
            OptionError: the prompt is empty or does not fit into the memory, or `slots` or `n_tokens` is invalid.
            ContextLengthError, ChatTemplateError: the prompt cannot be run.
        """
        from mlx_engine.research import Session

        ids = self.prompts.ids(prompt)
        self.prompts.fitting(len(ids) - 1, 1, None)
        return Session.begin(self.model, ids, slots=slots, n_tokens=n_tokens)

    def choose(self, prompt: Prompt, texts: Sequence[str | Sequence[int]]) -> list[TextChoice]:
        """Return texts with their exact probabilities as continuations of a prompt, most likely first.

        The log-probability of a text is the sum of the log-probabilities of its tokens. The prompt is encoded as for
        `generate`. Each text is a string or a list of token ids, and is encoded separately, so no token spans prompt
        and text: if the prompt ends with a word, pass `" Paris"` with its space. The prompt is run once, and the texts
        share passes.

        Raises:
            OptionError: there is no text, a text is empty, or an id is not in the vocabulary.
            ContextLengthError: the prompt and the longest text exceed the context.
            ChatTemplateError: the template is missing, refuses the messages, or fails.
            NotFiniteError: logits are NaN or infinite.
        """
        from mlx_engine.research import choose, ranked

        if isinstance(texts, str) or not len(texts) or not all(len(text) for text in texts):
            message = f"texts must be a list of non-empty texts or non-empty lists of ids, not {shown(texts)}"
            raise OptionError(message, option="texts", expected="texts that are not empty", found=texts)
        ids = self.prompts.ids(prompt)
        encoded = [self.prompts.checked(self.tokenizer.encode(t) if isinstance(t, str) else t) for t in texts]
        self.prompts.fitting(len(ids), max(map(len, encoded)), None)
        known = [t if isinstance(t, str) else None for t in texts]
        return ranked(known, encoded, choose(self.model, ids, encoded))

    @shows_options
    @names_options
    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        **options: Unpack[OptionValues],
    ) -> Answer:
        """Answer a conversation, and return the text, the reasoning and the tool calls of the answer.

        To continue a conversation after tool calls, append the `message` of the returned `Answer` to the messages. Then
        append a message with the output of each called tool:
        `{"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}`.

        Args:
            messages: the conversation, a list of messages such as `{"role": "user", "content": "Hello"}`.
            max_tokens: as for `stream`.
            tools: the functions that the model may call: Python functions, whose annotations and docstring are turned
                into a schema, or descriptions in the form of OpenAI's API.
            tool_choice: "auto", "none", "required", or the name of the tool that must be called.
            parallel_tool_calls: whether one answer may have several calls.
            variables: variables of the chat template, such as `enable_thinking`.
            options: as for `stream`.

        Raises:
            OptionError: an option is invalid, or there are tools and the format of the model's tool calls is unknown.
            ContextLengthError, ChatTemplateError, NotFiniteError: as for `stream`.
        """
        from mlx_engine.chat import answer_of, tool_choice_of
        from mlx_engine.conversation.functions import tools_of
        from mlx_engine.conversation.tools import with_choice
        from mlx_engine.tokenizer.chat_prompt import ChatPrompt

        described = tools_of(tools)
        choice = tool_choice_of(tool_choice, described, is_parallel=parallel_tool_calls)
        described = [] if tool_choice == "none" else described
        run = constrained(Options.of(max_tokens, **options), is_chat=True)
        run = replace(run, constraint=with_choice(run.constraint, self.tokenizer, described, choice))
        ids = self.prompts.chat_ids(ChatPrompt(messages, described, variables=variables or {}))
        return answer_of(self.run(ids, run), self.tokenizer, described)

    @shows_options
    @names_options
    def generate(self, prompt: Prompt, max_tokens: int | None = None, **options: Unpack[OptionValues]) -> Generation:
        """Generate text from a prompt. The arguments are those of `stream`."""
        return drained(self.run(prompt, Options.of(max_tokens, **options)))

    @shows_options
    @names_options
    def stream(
        self,
        prompt: Prompt,
        max_tokens: int | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[OptionValues],
    ) -> Stream:
        """Generate text and yield it in pieces; `.generation` of the returned object is the complete result.

        Args:
            prompt: text, token ids, or messages for the model's chat template.
            max_tokens: the largest number of new tokens. None means 256, or fewer if the context has room for fewer;
                -1 generates until the context is full; 0 runs the prompt and generates nothing.
            options: the options of a run, listed below and declared in `mlx_engine.options`. `stop` may be one string
                or several, and `logit_bias` a mapping; `timeout` starts when the first piece is requested.
            progress: called with (tokens done, tokens in total) during prefill.

        Raises:
            OptionError: an option is invalid, or the prompt is empty.
            ContextLengthError: prompt and max_tokens exceed the context.
            ChatTemplateError: the template is missing, refuses the messages, or fails.
            NotFiniteError: logits are NaN or infinite. The iteration over the pieces raises this error.
        """
        return self.run(prompt, Options.of(max_tokens, **options), progress=progress)

    @shows_options
    @names_options
    def astream(self, prompt: Prompt, max_tokens: int | None = None, **options: Unpack[OptionValues]) -> AsyncStream:
        """Generate text and yield it in pieces to asyncio: `async for piece in engine.astream(...)`.

        The arguments are those of `stream`. A separate thread encodes the prompt and runs all passes. If the task is
        cancelled, the run ends when the current pass ends. This call raises the errors of invalid options; the
        iteration over the pieces raises all other errors.
        """
        from mlx_engine.loop.stream import AsyncStream

        _ = self.model  # a closed engine is refused here
        return AsyncStream(partial(self.run, prompt, Options.of(max_tokens, **options)))

    @names_options
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_tokens: int | Sequence[int | None] | None = None,
        **options: Unpack[BatchOptionValues],
    ) -> list[Generation]:
        """Generate text from several prompts, which share forward passes.

        On backends with a fixed order of sums, each result is bit-identical to that of `generate` for the prompt alone
        (docs/exactness.md). If the logits of a prompt are NaN or infinite, only the result of this prompt has an
        `error`.

        Args:
            prompts: the prompts, as for `generate`.
            max_tokens: as for `generate`, or a list with one value per prompt.
            options: the other options of `generate`. A list has one value per prompt, except lists such as
                `stop=["a", "b"]`, `stop_token_ids=[1, 2]` and `processors=[f, g]`: these apply to all prompts. To give
                such an option one value per prompt, pass a list whose items are lists or None: `stop=[["a"], None]`.

        Raises:
            OptionError: an option is invalid, or a list has another length than `prompts`.
            ContextLengthError, ChatTemplateError: a prompt cannot be run.
        """
        each = one_per_prompt({"max_tokens": max_tokens, **options}, len(prompts))
        checked = [Options.of(**of) for of in each]
        requests = [self.request(prompt, of) for prompt, of in zip(prompts, checked, strict=True)]
        return [outcome(stream) for stream in self.run_requests(requests)]

    def run(
        self,
        prompt: Prompt,
        options: Options,
        *,
        progress: Progress | None = None,
        scheduler: Scheduler | None = None,
    ) -> Stream:
        """Return the same stream as `stream`, from an `Options` object. If `scheduler` is None, make one."""
        request = self.request(prompt, options)
        return Stream(scheduler or self.scheduler_for([request]), request, progress=progress)

    def run_requests(self, requests: Sequence[Request], scheduler: Scheduler | None = None) -> list[Stream]:
        """Return a stream for each request. If `scheduler` is None, make one.

        The streams share forward passes: reading one stream advances all.
        """
        for request in requests:  # requests made before the weights were loaded lack the time of loading
            request.metrics.phases = {**self.phases, **request.metrics.phases}
        if scheduler is None and self.model and requests:
            scheduler = self.scheduler_for(requests)
        return [Stream(scheduler, request) for request in requests] if scheduler else []

    def request(self, prompt: Prompt, options: Options, *, n: int = 1) -> Request:
        """Return a request for a scheduler, as `RequestBuilder.request` describes."""
        return self.prompts.request(prompt, options, n=n)

    def scheduler(
        self,
        *,
        slots: int = 4,
        kv_memory: int | None = None,
        prefix_cache: bool = True,
        whole_pages: bool = False,
        **options: Any,
    ) -> Scheduler:
        """Return a scheduler that accepts requests at any time.

        Args:
            slots: the largest number of answers that run at the same time.
            kv_memory: bytes for keys and values, including those of drafters; None takes half of the free memory. The
                model's pool is never larger than a full context in each slot.
            prefix_cache: keep the keys and values of prompts and answers for later requests with the same first tokens.
            whole_pages: reuse only whole pages of 64 tokens. Otherwise reported counts and the latency would show a
                client exactly how many tokens its prompt has in common with the prompt of another client.
            options: other options of `Scheduler`.

        Raises:
            OptionError: the memory is too small for a page in each slot, or larger than the free memory of a rank (a
                process that shares the model).
        """
        n_proposed = MOST_STATES if self.speculation.is_on else 0
        kv_memory, of_drafters = self._shares(slots, kv_memory)
        pool = pool_for(self.model, slots, kv_memory, n_proposed)
        prefix = PrefixCache(pool, whole_pages=whole_pages, disk=self._disk(pool)) if prefix_cache else None
        traffic = Traffic.of(self.model, pool)
        if self.speculation.is_on:
            # With `whole_pages`, lookup does not search the texts of other clients, because the latency of an answer
            # would reveal them.
            options["speculation"] = self.new_speculation(
                self.speculation.names,
                slots=slots,
                n_tokens=pool.n_tokens,
                kv_memory=of_drafters,
                keeps_others=prefix is not None and not whole_pages,
                whole_pages=whole_pages,
            )
        return Scheduler(self.model, pool, slots=slots, prefix=prefix, traffic=traffic, **options)

    def _shares(self, slots: int, kv_memory: int | None) -> tuple[int | None, dict[str, int]]:
        """Return the model's share of `kv_memory`, and a map from the names of drafters to their shares, in bytes.

        If no drafter has keys and values, return `kv_memory` and an empty map.
        """
        own = {
            name: pool_nbytes(of.kv_layers, COMPARED, slots)
            for name, of in ((DRAFT, None if self._draft is None else self._draft.model), (MTP, self.model.extra))
            if of is not None and name in self.speculation.names
        }
        if not own:
            return kv_memory, {}
        nbytes = spare_bytes(self.model) if kv_memory is None else kv_memory
        whole = pool_nbytes(self.model.kv_layers, COMPARED, slots) + sum(own.values())
        shares = {name: nbytes * size // whole for name, size in own.items()}
        return nbytes - sum(shares.values()), shares

    def new_speculation(
        self,
        names: Collection[str],
        *,
        slots: int,
        n_tokens: int,
        kv_memory: Mapping[str, int] | None = None,
        keeps_others: bool = False,
        whole_pages: bool = False,
    ) -> Speculation:
        """Return a `Speculation`, which proposes tokens, for a scheduler.

        Args:
            names: the names of the drafters.
            slots: the number of the scheduler's slots.
            n_tokens: the number of tokens that the scheduler's KV pool holds.
            kv_memory: maps the name of each drafter that has a KV pool to the largest number of bytes of this pool. If
                None, a drafter's pool holds as many tokens as the scheduler's pool, plus the proposed tokens.
            keeps_others: whether lookup also searches the text of sequences that have ended.
            whole_pages: whether a draft model reuses only whole pages of earlier sequences.
        """
        from mlx_engine.loop.draft import MOST, DraftModel
        from mlx_engine.loop.lookup import Lookups
        from mlx_engine.loop.mtp import NextTokens

        def pool_of(name: str, of: Model | ExtraLayer) -> KVPool:
            n = n_tokens + slots * MOST
            if kv_memory is not None:
                n = min(n, max(1, tokens_that_fit(of.kv_layers, kv_memory[name], slots, most=n)))
            return of.new_pool(n, n_sequences=slots, n_proposed=slots * MOST)

        passes: list[PassDrafter] = []
        if MTP in names and self.model.extra is not None:
            pool = pool_of(MTP, self.model.extra)
            passes.append(NextTokens(self.model, self.model.extra, pool, self._extra_share))
        if DRAFT in names and self._draft is not None:
            share, pool = self._draft.planned.n_parameters / self.n_parameters, pool_of(DRAFT, self._draft.model)
            passes.append(DraftModel(self._draft.model, pool, share, whole_pages=whole_pages))
        lookups = Lookups(keeps_others=keeps_others) if LOOKUP in names else None
        usual = self.speculation.names
        self.proposals = Speculation(lookups, int(self.config.vocab_size), passes=passes, usual=usual)
        return self.proposals

    def _proposing(self, requests: Sequence[Request]) -> list[str]:
        """Return the names of the drafters that these requests use, according to their option `speculate`.

        Raises:
            OptionError: a request asks for a drafter that was not loaded.
        """
        asked = {request.options.speculate for request in requests}
        if DRAFT in asked and self._draft is None:
            message = "speculate is 'draft', but the model was loaded without a draft model; load it with draft=MODEL"
            raise OptionError(message, option="speculate", expected="a draft model", found=DRAFT)
        if MTP in asked and self.model.extra is None:
            message = (
                "speculate is 'mtp', but the model was loaded without a layer of multi-token prediction; load it with "
                "speculate='mtp', or use 'auto' or 'lookup'"
            )
            raise OptionError(message, option="speculate", expected="another value", found=MTP)
        own = {*asked} - {AUTO_SPECULATION, OFF}
        return [*own, *(self.speculation.names if AUTO_SPECULATION in asked else ())]

    def scheduler_for(self, requests: Sequence[Request], *, keeps: bool = False) -> Scheduler:
        """Return a scheduler with memory for these requests.

        The scheduler has a prefix cache if `keeps` is true or keys and values are kept on disk, but never if the
        requests' option `kv` is false.

        Raises:
            OptionError: the requests differ in their option `kv`, or ask for a drafter that was not loaded.
        """
        kv = {request.options.kv for request in requests}
        if len(kv) != 1:
            raise OptionError("kv must be the same for all prompts", option="kv", found=sorted(kv))
        if not kv.pop():  # each pass runs one whole sequence, and nothing is kept for the next pass
            longest = max(request.longest for request in requests)
            return Scheduler(self.model, self.model.new_pool(longest, longest_pass=longest, kept=False))
        n_answers = [len(request.outputs) for request in requests]
        slots = max(min(sum(n_answers), BATCH_SLOTS), *n_answers)
        lengths = sorted((request.longest for request in requests for _ in request.outputs), reverse=True)
        n_tokens = max(sum(lengths[:slots]), *(r.longest * n for r, n in zip(requests, n_answers, strict=True)))
        names = self._proposing(requests)
        if not names:
            pool, proposals = self.model.new_pool(n_tokens, n_sequences=slots), None
        else:
            pool = self.model.new_pool(n_tokens, n_sequences=slots, n_proposed=MOST_STATES)
            proposals = self.new_speculation(names, slots=slots, n_tokens=n_tokens)
        prefix = None
        if self._prefixes is not None:
            self._prefixes.flush()  # unfinished writes would keep the memory of earlier schedulers' pools in use
        if keeps or self._prefixes is not None:
            prefix = PrefixCache(pool, disk=self._disk(pool))
        return Scheduler(self.model, pool, slots=slots, prefix=prefix, speculation=proposals)

    def _disk(self, pool: KVPool) -> DiskPrefixes | None:
        return None if self._prefixes is None else DiskPrefixes(pool, self._prefixes)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. The ids of a text begin with a BOS token if the file asks for it."""
        return self.prompts.ids(prompt)

    def chat_prompt(self, messages: Sequence[Message] | ChatPrompt, history: History | None = None) -> list[int]:
        """Render a conversation with the model's chat template; return its token ids, up to the start of the answer.

        Args:
            messages: the conversation, a list of messages such as `{"role": "user", "content": "Hello"}`. A control
                token in a message's content is encoded as plain text.
            history: token ids of earlier conversations. If the rendered text starts with the text of an earlier
                conversation, the ids of the earlier conversation are reused.

        Raises:
            OptionError: `messages` is not a list of messages.
            ChatTemplateError: the template is missing, refuses the messages, or fails.
        """
        return self.prompts.chat_ids(messages, history)

    def __enter__(self: Self) -> Self:
        """Return the engine itself; raise ClosedError if it has been closed."""
        _ = self.model
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._model is None:
            state = "closed"
        else:
            be = self._model.backend
            state = f"{self._about}, {be.name} on {be.device}"
        return f"<{type(self).__name__} {self.path.name}: {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise NotCopyableError(name="engine", hint="load the model in each process")


def _identified(path: Path, about: Mapping[str, str], files: str, kept: Path) -> dict[str, str]:
    """Return everything that determines keys and values, except the token ids, as a map from names to descriptions.

    Args:
        path: the model's file or folder.
        about: the digests of config, conversion and layers, and the properties of the backend.
        files: the `signature` of the files when they were loaded.
        kept: a folder that keeps the digest of the model's files, because computing the digest reads all files.
    """
    return {**about, "model": kept_digest(path, kept, files), "source": source_digest()}


class RequestBuilder:
    """Builds requests from prompts: encodes prompts, checks their length, and compiles constraints. Needs no weights.

    Attributes:
        config: the model's config.
        phases: seconds of each phase of loading so far, included in the metrics of every request.
        pooling: how the model makes embeddings, and whether it is a reranker.
        adapters: the adapters of the model; None without adapters.
    """

    def __init__(self, checkpoint: Checkpoint, path: Path, config: Any, adapters: Adapters | None = None) -> None:
        self.config, self.phases, self.adapters = config, dict[str, float](), adapters
        self.pooling = read_pooling(checkpoint, path)
        self._path = path
        self._checkpoint: Checkpoint | None = checkpoint  # None after the tokenizer has been built
        self._grammars: Grammars | None = None
        self._lock = kept_over_forks(threading.Lock())

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, built on first use; raise TokenizerError if this is impossible."""
        with self._lock:
            if self._checkpoint is not None:
                start = time.perf_counter()
                self._tokenizer = self._build_tokenizer(self._checkpoint)
                self.phases["build_tokenizer"] = time.perf_counter() - start
                self._checkpoint = None  # frees its metadata: 12 MB of strings, one per BPE merge
        return self._tokenizer

    def _build_tokenizer(self, checkpoint: Checkpoint) -> Tokenizer:
        from mlx_engine import tokenizer

        if checkpoint.naming == "hf":
            made = tokenizer.load_tokenizer(self._path)
        else:
            made = tokenizer.from_gguf(checkpoint.metadata, where=checkpoint.where)
        # If the embedding table has more rows than the tokenizer has tokens, add tokens without text.
        return made.padded(self.config.vocab_size)

    def close(self) -> None:
        """Release the checkpoint's file. After this, the tokenizer can no longer be built."""
        self._checkpoint = None

    def request(self, prompt: Prompt, options: Options, *, n: int = 1) -> Request:
        """Return a request for a scheduler: the prompt as token ids, and `n` empty outputs.

        Raises:
            OptionError: an option is invalid for this model, or the prompt is empty.
            ContextLengthError: prompt and max_tokens exceed the context.
            ChatTemplateError: the template is missing, refuses the messages, or fails.
        """
        options.check_vocabulary(self.config.vocab_size)
        options = constrained(options, is_chat=is_chat(prompt))
        # This must precede `metrics`, because building the tokenizer adds its time to `self.phases`.
        texts = [self.tokenizer.stream(at_start=False) for _ in range(n)]
        metrics = Metrics(phases=dict(self.phases))
        prompt_ids = metrics.record_phase("tokenize", lambda: self.ids(prompt))
        max_tokens = self.fitting(len(prompt_ids), options.max_tokens, options.context_len)
        end_ids = self.tokenizer.eog_ids
        outputs = [Output(options, max_tokens=max_tokens, text=text, end_ids=end_ids) for text in texts]
        matcher, n_top = None, options.prompt_logprobs
        if options.constraint is not None:
            matcher = metrics.record_phase("compile_constraint", partial(self.matcher, options.constraint, prompt_ids))
        reader = None if n_top is None else PromptLogprobs(prompt_ids, n_top)
        predicted = [] if options.prediction is None else self.tokenizer.encode(options.prediction)
        return Request(
            prompt_ids, options, outputs, metrics=metrics, matcher=matcher, reader=reader, predicted_ids=predicted,
            adapter=self.adapter(options.adapter),
        )  # fmt: skip

    def adapter(self, name: str | None) -> int:
        """Return the number of the named adapter.

        For None, return the number of the default adapter, or 0 if the model has no adapters.

        Raises:
            OptionError: no adapter has this name.
        """
        if self.adapters is not None:
            return self.adapters.index(name)
        return 0 if name is None else cast(int, refuse(name, ()))

    def embedding(
        self,
        text: str | Sequence[int],
        check: Callable[[str], None] = lambda text: None,
        adapter: str | None = None,
    ) -> Request:
        """Return a request that computes the vector of a text. When the request has ended, pass it to `vector`.

        The text is encoded with the first and last tokens that the model's files define. `check(text)` is called before
        the text is encoded, and may raise an exception to refuse the text.

        Raises:
            OptionError, ContextLengthError, ModelError: as `Engine.embed`.
        """
        if self.pooling.missing is not None:
            raise ModelError(
                f"{self._path.name}: embeddings: {self.pooling.missing} is not implemented; use another model"
            )
        if isinstance(text, str):
            check(text)
            if not text:
                raise OptionError("input is empty", option="input", expected="at least one character", found=text)
            end, eos = self.tokenizer.ends, self.tokenizer.eos_id
            if not end and eos is not None and self.pooling.is_declared and self.pooling.kind == "last":
                end = (eos,)
            ids = self.checked([*self.ids(text), *end])
        else:
            ids = self.checked(text)
        return self.reading(ids, PooledHidden(len(ids), self.pooling.kind), adapter)

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise OptionError unless `dimensions` is None or from 1 to the size of the model's vectors."""
        most: int = self.config.hidden_size
        if dimensions is not None and not (is_whole(dimensions) and 1 <= dimensions <= most):
            message = f"dimensions must be from 1 to the model's {most:,}, not {shown(dimensions)}"
            raise OptionError(message, option="dimensions", expected=f"1 to {most}", found=dimensions)

    def vector(self, request: Request, dimensions: int | None = None) -> np.ndarray:
        """Return the float32 vector of a request that `embedding` made and that has ended: (D,), or (dimensions,)."""
        assert isinstance(request.reader, PooledHidden)  # noqa: S101 - `embedding` has made it
        return request.reader.vector(dimensions, normalized=self.pooling.is_normalized)

    def reranking(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        check: Callable[[str], None] = lambda text: None,
        adapter: str | None = None,
    ) -> Request:
        """Return a request that computes a document's relevance. When the request has ended, pass it to `relevance`.

        Raises:
            ModelError, ContextLengthError: as `Engine.rerank`.
        """
        from mlx_engine.tokenizer.chat import label_ids, ranking_ids

        ranking = self.pooling.ranking
        if ranking is None:
            raise ModelError(
                f"{self._path.name}: is not known as a reranker: expected pooling type 4 (rank) in a GGUF file, or "
                "classifier_from_token in config.json of a folder; use a reranker, such as Qwen3-Reranker"
            )
        for text in (query, document, instruction or ""):
            check(text)
        ids = self.checked(ranking_ids(self.tokenizer, ranking.template, query, document, instruction))
        if ranking.classifier is not None:
            return self.reading(ids, PooledHidden(len(ids), "last"), adapter)
        return self.reading(ids, LastLogits(len(ids), label_ids(self.tokenizer, ranking.labels)), adapter)

    def relevance(self, request: Request) -> float:
        """Return the relevance, a float32 value from 0 to 1, of a request that `reranking` made and that has ended."""
        reader, ranking = request.reader, self.pooling.ranking
        if isinstance(reader, PooledHidden) and ranking is not None and ranking.classifier is not None:
            hidden = reader.vector(normalized=False).astype(np.float64)
            values = [math.fsum((row * hidden).tolist()) for row in ranking.classifier.astype(np.float64)]
        else:
            assert isinstance(reader, LastLogits)  # noqa: S101 - `reranking` has made it
            values = reader.values
        yes, no = values
        return float(np.float32(1 / (1 + math.exp(min(no - yes, 700)))))

    def reading(self, ids: list[int], reader: RowReader, adapter: str | None = None) -> Request:
        """Return a request that generates no tokens: it runs a prompt, and `reader` reads logits or hidden states."""
        self.fitting(len(ids), 0, None)
        output = Output(Options(0), max_tokens=0, text=NoText(), end_ids=())
        metrics = Metrics(phases=dict(self.phases))
        return Request(ids, Options(0), [output], metrics=metrics, reader=reader, adapter=self.adapter(adapter))

    @property
    def grammars(self) -> Grammars:
        """The compiler of constraints, made on first use."""
        tokenizer = self.tokenizer
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(tokenizer, self.config.vocab_size)
        return self._grammars

    def matcher(self, constraint: Constraint, prompt_ids: Sequence[int]) -> Matcher:
        """Return the matcher of a constraint for an answer to a prompt.

        Raises:
            OptionError: the constraint is invalid, or allows no text.
        """
        free = reasoning_after(self.tokenizer, prompt_ids) if constraint.follows_reasoning else None
        return self.grammars.matcher(constraint, free)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. The ids of a text begin with a BOS token if the file asks for it."""
        if is_chat(prompt):
            return self.chat_ids(prompt)  # type: ignore[arg-type]
        if not isinstance(prompt, str):
            return self.checked(prompt)  # type: ignore[arg-type]
        bos = self.tokenizer.bos_id if self.tokenizer.add_bos else None
        return self.checked([*([] if bos is None else [bos]), *self.tokenizer.encode(prompt)])

    def chat_ids(
        self,
        messages: Sequence[Message] | ChatPrompt,
        history: History | None = None,
        check: Callable[[str], None] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, as `Engine.chat_prompt` describes.

        `check(text)` is called before each piece of text is encoded, and may raise an exception to refuse the prompt.
        """
        from mlx_engine.conversation.template import chat_ids
        from mlx_engine.tokenizer.chat import unchecked

        return self.checked(chat_ids(self.tokenizer, messages, history, check=check or unchecked))

    def checked(self, ids: Sequence[Any]) -> list[int]:
        """Return token ids from any sequence, such as an array, as a list of ints.

        Raises:
            OptionError: `ids` is empty, or has an item that is not a token id of the vocabulary.
        """
        expected = f"a sequence of token ids from 0 to {self.config.vocab_size - 1}"
        try:
            # The elements of an mx.array are zero-dimensional arrays, which `operator.index` refuses.
            values = [i.item() if hasattr(i, "item") else i for i in ids]
            if isinstance(ids, bytes) or any(isinstance(value, bool) for value in values):
                raise TypeError("bytes and truth values are no ids")
            checked = [operator.index(value) for value in values]
        except (TypeError, ValueError) as error:
            message = f"the prompt must be {expected}, not {shown(ids)}"
            raise OptionError(message, option="prompt", expected=expected, found=ids) from error
        if not checked:
            raise OptionError("the prompt is empty", option="prompt", expected="at least one token")
        wrong = next((i for i in checked if not 0 <= i < self.config.vocab_size), None)
        if wrong is not None:
            message = f"the prompt must be {expected}, but has {wrong}"
            raise OptionError(message, option="prompt", expected=expected, found=wrong)
        return checked

    def fitting(self, n_prompt: int, max_tokens: int | None, context_len: int | None) -> int:
        """Return the largest number of new tokens after a prompt of `n_prompt` tokens.

        Return `max_tokens` itself if it is a number of tokens. For `UNTIL_FULL`, return the number of tokens that are
        left in the context; for None, this number but at most 256. If `context_len` is given, it shortens the context.

        Raises:
            ContextLengthError: prompt and `max_tokens` exceed the context.
        """
        whole: int = self.config.context_length
        length = whole if context_len is None else min(whole, context_len)
        room, least = length - n_prompt, 1 if max_tokens is None or max_tokens == UNTIL_FULL else max_tokens
        if room < least:
            prompt = f"{n_prompt:,} token{'' if n_prompt == 1 else 's'}"
            asked = f" and max_tokens is {least:,}" if least > 1 else ""
            whose = "context_len allows" if length < whole else "the model's context has"
            raise ContextLengthError(
                f"the prompt has {prompt}{asked}; {whose} {length:,} for prompt and answer",
                option="max_tokens" if least > 1 else "context_len" if length < whole else "prompt",
                expected=f"at most {length:,} tokens",
                found=n_prompt + least,
            )
        if max_tokens is not None and max_tokens != UNTIL_FULL:
            return max_tokens
        return min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else room


def is_chat(prompt: Prompt) -> bool:
    """Return whether a prompt consists of messages, for the chat template."""
    is_list = isinstance(prompt, list | tuple)
    return hasattr(prompt, "messages") or (is_list and isinstance(next(iter(prompt), None), Mapping))


def constrained(options: Options, *, is_chat: bool) -> Options:
    """Return the options. If `is_chat` is true, their constraint applies only after the reasoning of the answer."""
    if options.constraint is None or not is_chat:
        return options
    return replace(options, constraint=options.constraint.after_reasoning())


def reasoning_after(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> Reasoning | None:
    """Return the markers of the reasoning with which the answer to a prompt may begin; None if there is none."""
    from mlx_engine.conversation.delimiters import TAIL, think_markers

    markers = think_markers(tokenizer.chat_template)
    tail = tokenizer.decode(prompt_ids[-TAIL:]).rstrip()
    if markers is None or tail.endswith(markers.closing.rstrip()):  # the template has closed the reasoning
        return None
    is_open = tail.endswith(markers.opening.rstrip())
    opening = () if is_open else tuple(tokenizer.encode(markers.opening, special=True))
    return Reasoning(opening, markers.closing.encode())


def open_source(
    source: str | Path = "builtin",
    backend: str = "auto",
    quant: str = KEEP,
    threads: int | None = None,
    *,
    quant_min_dim: int | str = AUTO,
    quant_layers: Mapping[str, str] | None = None,
    allow_settings: Sequence[str] = (),
    jit: bool = True,
    context: int | None = None,
    activations: str = EXACT,
    kv_type: str | None = None,
    speculate: str = OFF,
    draft: str | Path | None = None,
    allow_too_large: bool = False,
    experts_memory: int | None = None,
    adapters: Sequence[str | Path] | Mapping[str, str | Path] = (),
    progress: Callable[[int, int], None] | None = None,
    shard: Shard | None = None,
) -> CheckedCheckpoint:
    """Open a model's files and check them, without reading weights. Arguments and errors are those of `load`.

    The `prompts` of the result can check prompts before the weights are loaded; `Engine(result)` loads the weights. By
    default `speculate` is "off", so that benchmarks measure passes that run one token per answer. `shard` describes the
    ranks that share the model; every rank calls this function.
    """
    if not isinstance(source, str | Path):
        message = f"source must be a path, a hub id or 'builtin', not {shown(source)}"
        raise OptionError(message, option="source", found=source)
    conversion = check_load_options(quant, threads, quant_min_dim, quant_layers)
    check_allowed(allow_settings)
    if log.VARIABLE in os.environ and log.LOGGER.level == logging.NOTSET:
        configure_log()
    # Check the backend before anything is downloaded; create it when the model file has been opened.
    check_backend(backend, activations)
    kv_type = kv_type_of(activations, kv_type)
    check_speculate(speculate)
    folders = named(adapters)
    if folders and shard is not None:
        message = "adapters need a model that one process runs alone; leave out shard"
        raise OptionError(message, option="adapters", expected="none", found=list(folders))
    check_draft(draft, speculate, is_shared=shard is not None)
    check_experts_memory(experts_memory, is_shared=shard is not None)
    path = resolve(source, progress)
    start, files = time.perf_counter(), signature(path)
    checkpoint = open_model(path, allow_settings)
    with_extra = speculate in (MTP, AUTO_SPECULATION) and shard is None
    planned = plan_model(checkpoint, conversion, context, with_extra=with_extra)
    if speculate == MTP and not planned.n_extra:
        message = (
            f"speculate is 'mtp', but {checkpoint.where} has no layer of multi-token prediction that this version runs "
            "(Qwen3.5 and 3.6, dense, on one rank); use 'auto' or 'lookup'"
        )
        raise OptionError(message, option="speculate", expected="another value", found=MTP)
    planned = planned._replace(adapters=open_adapters(folders, planned.tensors))
    seconds = time.perf_counter() - start
    how = bounded_threads(threads), jit, seconds, allow_too_large, shard, activations, kv_type, speculate
    opened = CheckedCheckpoint(path, planned, backend, *how, files=files, experts_memory=experts_memory)
    if draft is not None:
        opened.add_draft(resolve(draft, progress))
    return opened


def check_draft(draft: str | Path | None, speculate: str, *, is_shared: bool) -> None:
    """Raise OptionError if `speculate` needs a draft model that is not given, or if a given draft model is not used.

    A draft model is never used if several processes share the model (`is_shared`).
    """
    if draft is None and speculate == DRAFT:
        message = "draft must be a small model with the same vocabulary if speculate is 'draft'; no model is given"
        raise OptionError(message, option="draft", expected="a model", found=None)
    if draft is not None and speculate not in (DRAFT, AUTO_SPECULATION):
        message = f"draft is used only if speculate is 'draft' or 'auto', not {shown(speculate)}; leave out one option"
        raise OptionError(message, option="draft", expected="speculate of 'draft' or 'auto'", found=speculate)
    if draft is not None and is_shared:
        message = "draft needs a model that one process runs alone; leave out draft, or run the model on one rank"
        raise OptionError(message, option="draft", expected="one rank", found=shown(draft))


def check_experts_memory(nbytes: int | None, *, is_shared: bool) -> None:
    """If `nbytes` is not None, raise OptionError unless it is a whole number above 0 and `is_shared` is false."""
    if nbytes is not None and not (is_whole(nbytes) and nbytes > 0):
        message = f"experts_memory must be a number of bytes above 0, not {shown(nbytes)}"
        raise OptionError(message, option="experts_memory", expected="at least 1", found=nbytes)
    if nbytes is not None and is_shared:
        message = "experts_memory needs a model that one process runs alone; leave out shard"
        raise OptionError(message, option="experts_memory", expected="none", found=nbytes)


@dataclass(eq=False)
class LoadedDraft:
    """A draft model, planned first and then built; `model` is set when it has been built."""

    planned: Planned
    model: Model = field(init=False)


@dataclass(eq=False)
class CheckedCheckpoint:
    """A checkpoint whose settings and tensors have been checked, and whose weights are not loaded yet.

    Attributes:
        path: the file or folder.
        planned: the model's config and tensors, and their conversion; with `shard`, only the part of this rank.
        backend, threads, jit, allow_too_large, activations, kv_type, speculate, experts_memory: as for `load`.
        seconds: the time that opening the files took.
        prompts: builds requests from prompts.
        shard: the ranks that share the model; None if this process runs it alone.
        draft: the draft model, or None.
        files: the `signature` of the files before they were opened.
    """

    path: Path
    planned: Planned
    backend: str
    threads: int | None
    jit: bool
    seconds: float
    allow_too_large: bool = False
    shard: Shard | None = None
    activations: str = EXACT
    kv_type: str = EXACT
    speculate: str = OFF
    prompts: RequestBuilder = field(init=False)
    draft: LoadedDraft | None = None
    files: str = ""
    experts_memory: int | None = None
    _is_checked: bool = False

    def __post_init__(self) -> None:
        if self.shard is not None:
            config = hashlib.sha256(repr(self.config).encode()).hexdigest()
            settings = {"config": config, "conversion": str(self.planned.conversion), "jit": self.jit}
            settings |= {"activations": self.activations, "kv_type": self.kv_type}
            self.planned = self.shard.assigned(self.planned, self.path, self.made, settings)
        if self.experts_memory is not None:
            self._bound_experts(self.experts_memory)
        self.prompts = RequestBuilder(self.checkpoint, self.path, self.config, self.planned.adapters)

    def add_draft(self, path: Path) -> None:
        """Open the files of a draft model, and check its vocabulary.

        Raises:
            OptionError: the draft model has another vocabulary than the model.
            EngineError: the draft model cannot be read.
        """
        from mlx_engine.loop.draft import check_vocabulary

        planned = plan_model(open_model(path, ()), Conversion())
        check_vocabulary(self.prompts.tokenizer, RequestBuilder(planned.checkpoint, path, planned.config).tokenizer)
        self.draft = LoadedDraft(planned)

    @property
    def checkpoint(self) -> Checkpoint:
        """The contents of the files."""
        return self.planned.checkpoint

    @property
    def config(self) -> Any:
        """The model's config, see its file in `models/`."""
        return self.planned.config

    @cached_property
    def made(self) -> Backend:
        """The backend, created on first use."""
        needs = self.planned.needs() | (frozenset() if self.draft is None else self.draft.planned.needs())
        how: dict[str, Any] = {"activations": self.activations, "kv_type": self.kv_type, "needs": needs}
        return create_backend(self.backend, threads=self.threads, jit=self.jit, **how)

    def check_memory(self, n_tokens: int = 1, *, kv: int | None = None, spare: int = 0) -> None:
        """Compare the memory that the model needs with the free memory; warn of weights that are expanded to float32.

        If the model does not fit, but its experts can be read from the file, plan to hold only some of them in memory.
        Models with fewer than `FEW_PARAMETERS` parameters, and models whose weights are converted while they are read,
        are not checked. With `allow_too_large`, a model that is too large is not an error.

        Args:
            n_tokens: number of tokens of all sequences in the KV cache.
            kv: bytes of the KV cache; None computes them from `n_tokens`.
            spare: bytes that experts must leave free if not all of them fit into memory.

        Raises:
            NotEnoughMemoryError: the free memory is too small for the model.
        """
        self._is_checked = True
        if self.checkpoint.is_converted or self.planned.n_parameters < FEW_PARAMETERS:
            return
        outline = outlined(self.planned, self.made)
        for line in expansions(outline, self.made.name):
            log.warn(line)
        need = need_of(outline, n_tokens, kv=kv)
        if self.draft is not None:  # `kv` includes the draft model's cache
            need += need_of(outlined(self.draft.planned, self.made), n_tokens, kv=None if kv is None else 0)
        where, allowed = self.checkpoint.where, self.allow_too_large
        available = available_memory()
        are_left = need.check(where, available, allowed=allowed)
        can_bound = self.made.holds_some_experts and outline.sizes.has_only_mapped_experts
        if are_left and self.experts_memory is None and self.shard is None and can_bound:
            with contextlib.suppress(OptionError):  # if one token's experts do not fit, leave all experts mapped
                self._bound_experts(need.for_experts(available - spare))

    def _bound_experts(self, most: int) -> None:
        """Plan to hold at most `most` bytes of experts in memory: the same share of the experts in every layer.

        Raises:
            OptionError: `most` is too small for the experts of one token, the model has no experts, or the backend
                cannot hold only some of them.
        """
        share = outlined(self.planned, self.made).share_of_experts(self.made, most, self.checkpoint.where)
        self.planned = self.planned._replace(held_share=share)

    def build(self, progress: Progress | None = None) -> Loaded:
        """Read the weights and build the model; record load and warm-up time in `prompts.phases`.

        Raises:
            NotEnoughMemoryError: the free memory is too small for the model.
            EngineError: a weight cannot be read.
        """
        start = time.perf_counter()
        backend, loaded, created = self._load(progress)
        _read_ahead(backend)
        if self.shard is not None:
            loaded = loaded._replace(model=self.shard.lead(loaded.model))
        built = time.perf_counter()
        if backend.profiler is None:  # a profiler would count the warm-up
            backend.warm_up(lambda: forward_logits(loaded.model, SequenceInput([0], loaded.model.scratch_kv(1))))
        ended = time.perf_counter()
        phases = {"load": self.seconds + built - created, "warm_up": created - start + ended - built}
        self.prompts.phases = {**phases, **self.prompts.phases}
        return loaded

    def follow(self) -> None:
        """Read this rank's share of the weights, and run its part of every pass until rank 0 ends the run.

        Raises:
            NotEnoughMemoryError, EngineError: as `build`.
            ValueError: one process runs the model alone.
        """
        if self.shard is None:
            raise ValueError("follow: expected a model that several ranks share, found a model of this process alone")
        backend, loaded, _ = self._load()
        del self.planned, self.prompts  # frees the metadata: 27 MB of strings for a vocabulary of 150,000 tokens
        _read_ahead(backend)
        self.shard.follow(loaded.model)

    def _load(self, progress: Progress | None = None) -> tuple[Backend, Loaded, float]:
        """Return the backend, the loaded model, and the value of `time.perf_counter` after the backend was created."""
        if not self._is_checked:
            self.check_memory()
        backend = watched(self.made)
        created = time.perf_counter()
        try:
            loaded = self.planned.build(backend, progress)
            if self.draft is not None:
                self.draft.model = self.draft.planned.build(backend).model
        except MemoryError as error:
            raise out_of_memory(self.checkpoint.where, error) from error
        return backend, loaded, created


def _read_ahead(backend: Backend) -> None:
    """Give the memory that loading freed back to the operating system, then start reading the mapped weights.

    If the mapped weights were read first, peak memory would include both the freed heap and the mapped pages.
    """
    give_back_freed()
    backend.read_ahead()


def configure_log(level: str | None = None) -> None:
    """Print log events of at least `level` to stderr. For None, use the environment variable MLX_ENGINE_LOG, or "off".

    Raises:
        OptionError: the level does not exist.
    """
    chosen = level or os.environ.get(log.VARIABLE) or "off"
    option = "log_level" if level else log.VARIABLE
    if chosen not in log.LEVELS:
        raise OptionError(f"{option}: no level {chosen!r}; choose {listed(log.LEVELS)}", option=option, found=chosen)
    log.configure(chosen)
