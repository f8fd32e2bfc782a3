"""The command line with a planted fault: `python -m tests.load.planted FAULT serve ...`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mlx_engine.commands import main
from mlx_engine.loop.scheduler import Scheduler
from mlx_engine.models.decoder import Decoder
from mlx_engine.tokenizer import chat

# A request with this seed, or with this token as its prompt, meets the fault.
SEED, TOKEN = 666, 7


def plant(of: Any, name: str, fault: Callable[..., None]) -> None:
    """Call a fault before a function; it may raise."""
    planted = getattr(of, name)

    def call(*given: Any, **options: Any) -> Any:
        fault(*given)
        return planted(*given, **options)

    setattr(of, name, call)


def in_sampling() -> None:
    from mlx_engine.loop.sampler import Sampler

    def fault(sampler: Sampler) -> None:
        if sampler._sampling.seed == SEED and len(sampler._recent) > sampler._n_prompt + 3:
            raise RuntimeError("planted")

    plant(Sampler, "draw", fault)


def in_one_pass() -> None:
    def fault(model: Decoder, batch: Any) -> None:
        if TOKEN in list(batch.ids):
            raise RuntimeError("planted")

    plant(Decoder, "forward", fault)


def in_every_pass() -> None:
    def fault(*given: object) -> None:
        raise RuntimeError("planted")

    plant(Decoder, "forward", fault)


def in_template() -> None:
    def fault(tokenizer: object, messages: Any, *given: object) -> None:
        if "planted" in str(messages):
            raise RuntimeError("planted")

    plant(chat, "_rendered", fault)


def of_thread(error: BaseException) -> None:
    """End the engine thread, outside of all requests, when an answer has 20 tokens."""

    def fault(scheduler: Scheduler) -> None:
        if any(len(answer.output.token_ids) >= 20 for answer in scheduler.running):
            raise error

    plant(Scheduler, "_admit", fault)


NO_LENGTH_CHECK = "no length check"


def no_length_check() -> None:
    """Encode texts that cannot fit, as if the context were very long."""
    from mlx_engine.serve.service import Service

    Service.check_length = lambda self, text: None  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[], None]] = {
    "sampling": in_sampling,
    "one pass": in_one_pass,
    "every pass": in_every_pass,
    "template": in_template,
    "exit": lambda: of_thread(SystemExit(0)),
    NO_LENGTH_CHECK: no_length_check,
    "memory": lambda: of_thread(MemoryError("planted")),
}

if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
