"""Mutants of the commands: names of models on the hub, sampling options, hints, and what --verbose adds."""

from tests.mutants.plant import Mutant

NAMES, SUGGESTED = "mlx_engine/checkpoint/hub_names.py", "mlx_engine/commands/options/suggested.py"

MUTANTS = [
    Mutant(
        "a type is any part of a name", NAMES, "of_type", r'rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])"', "wanted"
    ),
    Mutant("every host is the hub", NAMES, "_from_address", "parts.netloc.lower() not in HOSTS", "False"),
    Mutant("every branch is the main one", NAMES, "_from_address", "branch != BRANCH", "False"),
    Mutant(
        "suggestions are given options",
        SUGGESTED,
        "choose_sampling",
        "without_effect(given, used)",
        "without_effect(used, used)",
    ),
    Mutant(
        "suggestions are offered to who has chosen",
        SUGGESTED,
        "offered",
        '_is_given(invocation, "temperature") or Sampling(**suggested.values) == Sampling()',
        "Sampling(**suggested.values) == Sampling()",
    ),
    Mutant(
        "no note without --verbose",
        "mlx_engine/commands/generate.py",
        "notes",
        "[note for note in engine.notes if note not in fused]",
        "[]",
    ),
    Mutant(
        "-1 is the default number of tokens",
        "mlx_engine/prompts.py",
        "Prompts.fitting",
        "min(DEFAULT_MAX_TOKENS, room) if max_tokens is None else room",
        "min(DEFAULT_MAX_TOKENS, room)",
    ),
    Mutant(
        "an answer of the server fills the model's context",
        "mlx_engine/serve/service.py",
        "Service.context",
        "self.context_len or context",
        "context",
    ),
    Mutant(
        "completion of cli.py",
        "mlx_engine/commands/__init__.py",
        "main",
        '"mlx-engine" if {*COMPLETION} & {*sys.argv[1:]} else None',
        "None",
    ),
]
