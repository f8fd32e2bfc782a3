"""The settings of a sweep: its rungs and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_engine.backends import check_backend
from mlx_engine.bench.ladder import RUNGS, Rung
from mlx_engine.bench.samples import Test
from mlx_engine.errors import Words, require
from mlx_engine.weights.conversion import STORED, Conversion

# Seconds per cell: all rungs of the built-in model then take two to three minutes.
BUDGET = 10.0
# Number of passes of the long decode test, with and without a cache.
PASSES = 256
# Prompt lengths for a long context, and for a short one.
PROMPTS, SHORT_PROMPTS = (128, 512), (16, 64, 256)


@dataclass(frozen=True)
class Plan:
    """The settings of a sweep. If `prompts` is None, the prompt lengths suit the model's context."""

    prompts: Sequence[int] | None = None
    n_gen: int = 64
    quant: Conversion = STORED
    threads: int | None = None
    repetitions: int = 5
    budget: float = BUDGET
    backends: Sequence[str] | None = None
    passes: int = PASSES
    allow_settings: Sequence[str] = ()
    allow_too_large: bool = False

    def rungs(self) -> list[Rung]:
        """Return the rungs of the chosen backends.

        Raises:
            BackendUnavailableError: a name is not the name of a backend.
        """
        for name in self.backends or ():
            if all(rung.backend != name for rung in RUNGS):
                check_backend(name)
        return [rung for rung in RUNGS if self.backends is None or rung.backend in self.backends]

    def tests(self, context: int) -> list[Test]:
        """Return the tests of a rung.

        Raises:
            OptionError: there is no test, or one does not fit the context.
        """
        given = PROMPTS if context >= 2 * max(PROMPTS) else SHORT_PROMPTS
        fitting = [n for n in given if n <= context]
        lengths = fitting if self.prompts is None else [n for n in self.prompts if n]
        n_gen = min(self.n_gen, context) if self.prompts is None else self.n_gen
        tests = [Test(n_prompt=n) for n in lengths] + ([Test(n_gen=n_gen)] if n_gen else [])
        require(len(tests) > 0, option="-p, -n", expected="at least one test", found=Words("none"))
        for test in tests:
            fits = test.n_tokens <= context
            require(fits, option=test.name, expected=f"at most {context:,} tokens, the context", found=test.n_tokens)
        return tests
