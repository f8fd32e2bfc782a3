"""The public interface: load a model, get logits, generate text."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_engine.backends import check_backend
from mlx_engine.backends.base import Backend
from mlx_engine.cache import New
from mlx_engine.cache.prefix import PrefixCache
from mlx_engine.checkpoint.sources import resolve
from mlx_engine.config.rope import context_notes
from mlx_engine.decode.finite import check_logits
from mlx_engine.decode.keywords import OptionValues, one_per_prompt, shows_options
from mlx_engine.decode.options import Options, names_options
from mlx_engine.decode.step import forward_logits
from mlx_engine.distributed.shard import Shard
from mlx_engine.errors import require
from mlx_engine.loaded import LoadedModel
from mlx_engine.machine.cores import bounded_threads
from mlx_engine.observe import log
from mlx_engine.opened import Opened
from mlx_engine.prompts import Prompt, Prompts
from mlx_engine.schedule.memory import pool_for
from mlx_engine.schedule.request import Request
from mlx_engine.schedule.scheduler import Scheduler
from mlx_engine.schedule.stream import Generation, Progress, Steps, Stream, drained, outcome
from mlx_engine.schedule.traffic import Traffic
from mlx_engine.schedule.uncached import Uncached
from mlx_engine.weights.allowed import check_allowed, open_model
from mlx_engine.weights.conversion import AUTO, KEEP, check_load_options
from mlx_engine.weights.model import plan_model

if TYPE_CHECKING:
    import mlx.core as mx
    from typing_extensions import Unpack

    from mlx_engine.tokenizer import Tokenizer
    from mlx_engine.tokenizer.chat import History
    from mlx_engine.tokenizer.chat_prompt import ChatPrompt, Message

# The largest number of prompts of a batch in one forward pass.
BATCH_SLOTS = 32


class Engine(LoadedModel):
    """A model on a backend, with its tokenizer. Made by `load`; `with load(...) as engine:` closes it at the end.

    Attributes:
        path: the file or folder of the model.
        notes: lines for the user about how the model was loaded.
        architecture: the checkpoint's architecture.
        n_tensors: number of the model's tensors.
        n_parameters: number of the model's parameters.
    """

    def __init__(self, opened: Opened, progress: Progress | None = None) -> None:
        """Load the weights of a model whose files have been opened."""
        model, converted = opened.build(progress)
        planned = opened.planned
        self.architecture = opened.checkpoint.architecture
        self.n_tensors, self.n_parameters = len(planned.tensors), planned.n_parameters
        about = f"{self.architecture}, {self.n_parameters / 1e6:,.1f}M parameters, {converted.weights}"
        super().__init__(model, opened.path, about)
        self._prompts = opened.prompts
        program = model.program.fused.notes()
        shared = () if opened.shard is None else opened.shard.notes
        notes = opened.checkpoint.notes, converted.notes(), program, context_notes(model.config), shared
        self.notes = tuple(note for some in notes for note in some)

    def close(self) -> None:
        """Do what `LoadedModel.close` does, and free the file."""
        super().close()
        self._prompts.close()

    @property
    def prompts(self) -> Prompts:
        """What makes requests from prompts.

        Raises:
            ClosedError: the engine has been closed.
        """
        _ = self.model
        return self._prompts

    @property
    def config(self) -> Any:
        """The model's config, see the model file."""
        return self.model.config

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
            NotFiniteError: logits are NaN or infinite; the error names the first layer.
        """
        import mlx.core as mx

        checked = self.prompts.checked(ids)
        self.prompts.fitting(len(checked) - 1, 1, None)
        with self.backend.session():
            new = New(checked, self.model.scratch_kv(len(checked)), wanted=None)
            logits = forward_logits(self.model, new)
            check_logits(self.model, logits, checked)
            return mx.array(self.backend.host(logits))

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
            max_tokens: the largest number of new tokens; None means 256, or what the context leaves; -1 all of that; 0
                reads the prompt alone.
            temperature: 0 takes the most likely token; otherwise logits are divided by it.
            top_k: choose among the k most likely tokens.
            top_p: choose among the most likely tokens that together reach this probability; 0 takes the most likely.
            min_p: drop tokens less than this times as likely as the most likely one.
            repetition_penalty: above 1, tokens that are in the text already become less likely.
            presence_penalty: above 0, tokens that have been generated become less likely; -2 to 2.
            frequency_penalty: above 0, tokens become less likely each time they are generated; -2 to 2.
            logit_bias: numbers from -100 to 100 by token id, which are added to the logits.
            seed: seed of the random numbers; None takes a new one.
            kv: use a KV cache; without it each pass runs the whole sequence again.
            stop: a string or several; the text ends before the first to appear.
            ignore_eos: continue after end-of-text tokens.
            timeout: seconds, from when the first piece is asked for, after which the text ends; a pass that is running
                is not interrupted.
            context_len: limit of prompt and new tokens in total, if lower than the model's context.
            logprobs: compute the log-probability of every new token, and list that many alternatives, 0 to 20.
            progress: called with (tokens done, tokens in total) during prefill.

        Raises:
            OptionError: an option is invalid, or the prompt is empty.
            ContextLengthError: prompt and max_tokens exceed the context.
            ChatTemplateError: the template is missing, refuses the messages, or fails.
            NotFiniteError: logits are NaN or infinite, which is found while pieces are read.
        """
        return self.run(prompt, Options.of(max_tokens, **options), progress=progress)

    @names_options
    def generate_batch(self, prompts: Sequence[Prompt], max_tokens: Any = None, **options: Any) -> list[Generation]:
        """Generate text from several prompts, which share forward passes.

        Each generation is bit for bit the one that `generate` returns for its prompt alone, on backends with one order
        of summation, see README. If the logits of a prompt are NaN or infinite, its generation alone has an `error`.

        Args:
            prompts: the prompts, each as `generate` takes it.
            max_tokens: as for `generate`, or a list with one value per prompt.
            options: the other options of `generate`; a list has one value per prompt. A list of strings as `stop` is
                for all prompts; for one value per prompt, each element is itself a list or None.

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
        """Do the same as `stream`, with an `Options` object. `scheduler` runs the request; None makes one for it."""
        request = self.request(prompt, options)
        return Stream(scheduler or self._steps([request]), request, progress=progress)

    def run_requests(self, requests: Sequence[Request]) -> list[Stream]:
        """Return a stream for each request. The streams share forward passes: each continues while any is read."""
        for request in requests:  # it may have been made before the weights were loaded
            request.metrics.phases = {**self.phases, **request.metrics.phases}
        steps = self._steps(requests) if self.model and requests else None
        return [Stream(steps, request) for request in requests] if steps else []

    def request(self, prompt: Prompt, options: Options, *, n: int = 1) -> Request:
        """Return a request for a scheduler: the prompt as token ids, and `n` empty outputs.

        Raises:
            OptionError, ContextLengthError, ChatTemplateError: as `stream`.
        """
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
        """Return a scheduler for requests that come and go.

        Args:
            slots: the largest number of answers that run at the same time.
            kv_memory: bytes for keys and values; None takes what the machine can spare, at most a full context for
                each slot.
            prefix_cache: keep the keys and values of prompts and answers for later requests that begin alike.
            whole_pages: reuse whole pages of 64 tokens alone, so that neither counts nor times tell a client how many
                tokens its prompt has in common with that of another.
            options: other options of `Scheduler`.

        Raises:
            OptionError: the memory is too small for a single page.
        """
        pool = pool_for(self.model, slots, kv_memory)
        prefix = PrefixCache(pool, whole_pages=whole_pages) if prefix_cache else None
        traffic = Traffic.of(self.model, pool)
        return Scheduler(self.model, pool, slots=slots, prefix=prefix, traffic=traffic, **options)

    def _steps(self, requests: Sequence[Request]) -> Steps:
        """Return a scheduler with memory for these requests."""
        kv = {request.options.kv for request in requests}
        require(len(kv) == 1, option="kv", expected="the same value for all prompts", found=sorted(kv))
        if not kv.pop():
            return Uncached(self.model)
        n_answers = [len(request.outputs) for request in requests]
        slots = max(min(sum(n_answers), BATCH_SLOTS), *n_answers)
        longest = sorted((request.longest for request in requests for _ in request.outputs), reverse=True)
        n_tokens = max(sum(longest[:slots]), *(r.longest * n for r, n in zip(requests, n_answers, strict=True)))
        return Scheduler(self.model, self.model.new_pool(n_tokens, n_sequences=slots), slots=slots)

    def prompt_ids(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: text is encoded, after a BOS token if the file asks for one."""
        return self.prompts.ids(prompt)

    def chat_prompt(self, messages: Sequence[Message] | ChatPrompt, history: History | None = None) -> list[int]:
        """Return the token ids of a conversation by the model's chat template, up to the start of the answer.

        Args:
            messages: such as `{"role": "user", "content": "Hello"}`. Control tokens in a content are read as text.
            history: ids of earlier conversations, used where the rendered text begins with theirs.

        Raises:
            OptionError: `messages` is not a list of messages.
            ChatTemplateError: the template is missing, refuses the messages, or fails.
        """
        return self.prompts.chat_ids(messages, history)


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
    allow_too_large: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """Load a model.

    Args:
        source: a GGUF file, a Hugging Face folder, a hub id "org/repo[:file or type]", or "builtin".
        backend: a name that the `backends` command lists, or "auto" for the fastest on this machine.
        quant: "keep" multiplies weights as they are stored; "f32", "q8_0", "q4_0", "q4_1" convert the linear layers.
        threads: number of threads, for CPU backends; None takes all cores that this process may use, and a larger
            number than that is reduced, with a warning.
        quant_min_dim: linear layers whose longer side is shorter are not quantised; "auto" is the measured width from
            which on quantising is faster, see `mlx_engine.weights.conversion`.
        quant_layers: types that override `quant`: {"attn_v": "f32", "ffn": "q4_0", "output": "keep"}; keys are GGUF
            names of layers, or the groups "attention" and "ffn".
        allow_settings: names of settings that are ignored if they are not implemented, although results may be wrong;
            `notes` of the engine says so. "rope_scaling.factor" is a nested setting.
        jit: use compiled CPU kernels if they are available; without it, NumPy.
        context: the longest sequence in tokens, for models with LongRoPE or dynamic NTK: they have other rotary
            frequencies for longer contexts, which are chosen here; None is the context of their training.
        allow_too_large: load a model that needs more memory than is free.
        progress: called with (tensors prepared, tensors in total); for a "shape:" source, also while it is written.

    Raises:
        OptionError: an option is invalid, or the model has no such layer or setting.
        BackendUnavailableError: this machine cannot run the backend.
        SourceError, FormatError, ModelError: the model cannot be found, read or built.
        NotEnoughMemoryError: the model needs more memory than is free.
    """
    options: dict[str, Any] = {"quant_min_dim": quant_min_dim, "quant_layers": quant_layers, "context": context}
    options |= {"allow_settings": allow_settings, "jit": jit, "progress": progress}
    options |= {"allow_too_large": allow_too_large}
    return Engine(open_source(source, backend, quant, threads, **options), progress)


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
    allow_too_large: bool = False,
    progress: Callable[[int, int], None] | None = None,
    shard: Shard | None = None,
) -> Opened:
    """Open a model's files and check them, without reading a weight. Arguments and errors are those of `load`.

    `shard` has the ranks that share the model; all of them call this function.

    `Engine` loads the weights of what this returns; before, `prompts` of it can check prompts.
    """
    sound = isinstance(source, str | Path)
    require(sound, option="source", expected="a path, a hub id or 'builtin'", found=source)
    conversion = check_load_options(quant, threads, quant_min_dim, quant_layers)
    check_allowed(allow_settings)
    if log.VARIABLE in os.environ and log.LOGGER.level == logging.NOTSET:
        configure_log()
    # Check the backend before anything is downloaded; create it when the model file has been opened.
    check_backend(backend)
    path = resolve(source, progress)
    start = time.perf_counter()
    checkpoint = open_model(path, allow_settings)
    planned = plan_model(checkpoint, conversion, context)
    seconds = time.perf_counter() - start
    return Opened(path, planned, backend, bounded_threads(threads), jit, seconds, allow_too_large, shard)


def configure_log(level: str | None = None) -> None:
    """Print log events of `level` to stderr; by default, of the level in the environment variable MLX_ENGINE_LOG.

    Raises:
        OptionError: the level does not exist.
    """
    chosen = level or os.environ.get(log.VARIABLE) or "off"
    option = "log level" if level else log.VARIABLE
    require(chosen in log.LEVELS, option=option, expected=" or ".join(log.LEVELS), found=chosen)
    log.configure(chosen)
