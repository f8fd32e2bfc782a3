"""`Service`: the objects that all routes of one model share: its worker, its names, and settings of the server."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import mlx_engine
from mlx_engine.backends import EXACT, kv_type_of, types_of
from mlx_engine.engine import Engine
from mlx_engine.errors import ContextLengthError, OptionError
from mlx_engine.serve.errors import ApiError, cut
from mlx_engine.serve.journal import Recorder
from mlx_engine.serve.limits import MAX_BODY, Bodies, Turns
from mlx_engine.serve.prometheus import Metrics
from mlx_engine.serve.worker import Worker
from mlx_engine.weights.adapters import BASE


@dataclass
class Service:
    """A served model.

    Attributes:
        model: the name of the model in requests and replies.
        aliases: other names by which requests may name the model.
        adapters: the names of LoRA adapters; a request for the model MODEL:ADAPTER uses the adapter.
        any_model: whether requests may name any model; an unknown name then means this model.
        api_key: the key that requests must have; None if requests need no key.
        max_body: the largest body of a request in bytes.
        keep_alive_seconds: the time without new text after which a stream gets a comment or an event without text.
        hosts: names by which clients may address the server, see `origins.py`; None for any name.
        origins: the origins, in addition to the server's own, whose web pages may use the API.
        explains_cache: whether a reply says where its prompt differs from the prefix cache. This reveals whether other
            clients' prompts begin with the same text.
        bandwidth: the machine's memory bandwidth in bytes per second; None if it is unknown.
        clock: returns the time in seconds, to measure requests; the same clock as the scheduler's.
        recorder: writes the journal; None if no journal is written.
        context_len: the most tokens of a prompt and its answer together; None for the model's context length.
        sampling: defaults of sampling options, in place of the API's defaults.
        created: when this object was made, in Unix seconds; shown as the model's date.
        bodies: reads large bodies of requests at a bounded rate.
        turns: limits how many requests are parsed and encoded at the same time.
    """

    worker: Worker
    model: str
    aliases: Sequence[str] = ()
    adapters: Sequence[str] = ()
    any_model: bool = False
    metrics: Metrics = field(default_factory=Metrics)
    api_key: str | None = None
    max_body: int = MAX_BODY
    keep_alive_seconds: float = 5.0
    hosts: Collection[str] | None = None
    origins: Sequence[str] = ()
    explains_cache: bool = True
    bandwidth: float | None = None
    clock: Callable[[], float] = time.perf_counter
    recorder: Recorder | None = None
    context_len: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))
    bodies: Bodies = field(default_factory=Bodies)
    turns: Turns = field(default_factory=Turns)

    @property
    def engine(self) -> Engine:
        """The engine; raise ApiError (503) if it does not accept requests."""
        return self.worker.check_open()

    @property
    def fingerprint(self) -> str:
        """The version and the backend; also the types of activations and of keys and values, if not the defaults."""
        be = self.engine.backend
        rounded = "" if be.activations == EXACT else f"-{be.activations}"
        rounded += "" if be.kv_type == kv_type_of(be.activations) else f"-kv_{be.kv_type}"
        return f"mlx_engine-{mlx_engine.__version__}-{be.name}{rounded}"

    @property
    def models(self) -> list[str]:
        """The names that requests may use: the model's own name, its aliases, and each of these with each adapter."""
        return list(self._named)

    def adapter(self, name: str | None) -> str | None:
        """Return the adapter that a request's model name selects; BASE (the model alone) if it selects no adapter.

        Return None if the model has no adapters.
        """
        if not self.adapters:
            return None
        return BASE if name is None else self._named.get(name, ("", BASE))[1]

    @property
    def _named(self) -> dict[str, tuple[str, str]]:
        """A map from each name that requests may use to the name in replies (MODEL or MODEL:ADAPTER) and the adapter.

        Splitting a name at its colon would be ambiguous, because models and adapters may have colons in their names.
        """
        names = list(dict.fromkeys([self.model, *self.aliases]))
        found = dict.fromkeys(names, (self.model, BASE))
        for name in names:
            for adapter in self.adapters:
                found.setdefault(f"{name}:{adapter}", (f"{self.model}:{adapter}", adapter))
        return found

    def check_names(self) -> None:
        """Raise OptionError if a name MODEL:ADAPTER is ambiguous, for example because it is also an alias."""
        n = len({self.model, *self.aliases}) * (1 + len(self.adapters))
        if len(self.models) < n:
            expected = "different names MODEL:ADAPTER, none of which is an alias"
            message = f"--adapter: expected {expected}; rename an adapter with --adapter NAME=PATH"
            raise OptionError(message, option="--adapter", expected=expected, found=list(self.adapters))

    def model_card(self, name: str) -> dict[str, object]:
        """Return the entry of /v1/models for one name of the model, with the keys of OpenAI's and Anthropic's APIs."""
        made = datetime.fromtimestamp(self.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        openai = {"object": "model", "created": self.created, "owned_by": "mlx_engine"}
        anthropic = {"type": "model", "display_name": name, "created_at": made, "lifecycle": "active"}
        loaded: dict[str, object] = {}
        if self.worker.state == "ok":  # clients read vLLM's key `max_model_len`, the context length
            loaded = {"max_model_len": self.context, **types_of(self.engine.backend)}
        own = self._named.get(name, (name, ""))[0]
        alias = {"alias_of": own} if own != name else {}
        return {"id": name, **openai, **anthropic, **alias, **loaded}

    def most_tokens(self, ids: Sequence[int], n: int) -> int:
        """Return the largest number of new tokens in each of n answers to the prompt `ids`.

        The context and the memory for keys and values limit this number. The result is at least 1: if no token fits,
        the engine refuses the request.
        """
        by_memory = self.worker.capacity // n + 1  # the last token needs no keys and values
        return max(1, min(self.context, by_memory) - len(ids))

    @property
    def context(self) -> int:
        """The largest number of tokens of a prompt and its answer."""
        context: int = self.engine.config.context_length
        return min(context, self.context_len or context)

    @property
    def most_ids(self) -> int:
        """The most ids that /detokenize accepts, to limit its time: the model's context, but at least 131,072."""
        context: int = self.engine.config.context_length
        return max(context, 1 << 17)

    def check_messages(self, n: int) -> None:
        """Raise ContextLengthError if the context is too short for n messages, of at least one token each."""
        if n > self.context:
            raise self._too_long(f"{n:,} messages", n)

    def check_length(self, text: str) -> None:
        """Raise ContextLengthError if a text is too long for the context, without encoding the text.

        A token has at most `Tokenizer.most_bytes` bytes, so a text of n bytes has at least n / `most_bytes` tokens.
        If `most_bytes` is None, every text passes.
        """
        most = self.engine.tokenizer.most_bytes
        n = len(text.encode(errors="surrogatepass")) if most is not None else 0
        if most is not None and n > self.context * most:
            raise self._too_long(f"{n:,} bytes, which are at least {-(-n // most):,} tokens", n)

    def _too_long(self, what: str, n: int) -> ContextLengthError:
        message = f"the prompt has {what}; the context has {self.context:,} tokens"
        return ContextLengthError(message, option="prompt", expected=f"at most {self.context:,} tokens", found=n)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError if a request names a model that is not in `models`, unless `any_model` is true."""
        if name is not None and name not in self.models and not self.any_model:
            names = ", ".join(map(repr, self.models))
            message = f"no model {cut(name)!r}; this server has {names}; the server's option --alias NAME adds a name"
            raise ApiError(404, message, param="model", code="model_not_found")
