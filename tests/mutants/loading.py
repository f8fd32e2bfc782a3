"""Mutants of loading: what is checked before the weights are read, threads, and memory."""

from tests.mutants.plant import Mutant

MUTANTS = [
    Mutant(
        "chat finds out after loading that no answer fits the context",
        "mlx_engine/commands/chat.py",
        "chat",
        "check(opened.prompts, options, system, variables)",
        "None",
    ),
    Mutant(
        "a conversation is rendered after loading only",
        "mlx_engine/commands/chat.py",
        "chat",
        "conversation_ids(opened.prompts, messages, variables)",
        "None",
    ),
    Mutant(
        "a request forgets the seconds of loading",
        "mlx_engine/engine.py",
        "Engine.run_requests",
        "{**self.phases, **request.metrics.phases}",
        "request.metrics.phases",
    ),
]
