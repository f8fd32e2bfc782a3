"""Check the options of `bench` against each other, and make the plan of a sweep from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mlx_engine.commands.bench_options import MeasureOptions, ModeOptions, OutputOptions, TimingOptions
from mlx_engine.errors import OptionError, is_number, require

if TYPE_CHECKING:
    from mlx_engine.bench.sweep_plan import Plan
    from mlx_engine.commands.concurrency_options import ConcurrencyOptions
    from mlx_engine.commands.options.model import ComputeOptions
    from mlx_engine.weights.conversion import Conversion

IGNORED_BY_SWEEP = ("both", "depth", "kv", "no_jit", "no_overlap")


def check_values(timing: TimingOptions, output: OutputOptions) -> None:
    """Check the values of options before anything is run.

    Raises:
        OptionError: a value is invalid.
    """
    from mlx_engine.bench.tables import FORMATS

    sound = timing.budget is None or (is_number(timing.budget) and timing.budget >= 0)
    require(sound, option="--budget", expected="a finite number of seconds >= 0", found=timing.budget)
    require(output.output in FORMATS, option="--output", expected=" or ".join(FORMATS), found=output.output)


def refuse_ignored(mode: ModeOptions, given: Mapping[str, str]) -> None:
    """Check that no option was given that a mode would ignore. `given` has the given flags by name.

    Raises:
        OptionError: an option would be ignored.
    """
    option, ignored = "", []
    if mode.compare is not None:
        option, ignored = "--compare", [flag for name, flag in given.items() if name not in ("compare", "out")]
    elif mode.sweep:
        option, ignored = "--sweep", [flag for name, flag in given.items() if name in IGNORED_BY_SWEEP]
    require(not ignored, option=option, expected="no option that it would ignore", found=", ".join(ignored))


def refuse_sharing(tests: MeasureOptions, mode: ModeOptions, clients: ConcurrencyOptions) -> None:
    """Check that the mode can measure a model that several machines share: one engine, on one backend.

    Raises:
        OptionError: it cannot.
    """
    modes = {"--sweep": mode.sweep, "--compare": mode.compare is not None, "--url": clients.url is not None}
    others = [flag for flag, is_given in modes.items() if is_given]
    require(not others, option="--shard", expected="no other mode with it", found=", ".join(others))
    names = names_of(tests.backend or ["auto"])
    require(len(names) == 1, option="--shard", expected="one backend with it", found=", ".join(names))


def names_of(backends: list[str]) -> list[str]:
    """Return the names of the chosen backends, with `all` and `auto` resolved."""
    from mlx_engine.backends import auto, backend_names

    spelled = {"all": backend_names(), "auto": [auto()]}
    return [name for given in backends for name in spelled.get(given, [given])]


def plan_of(tests: MeasureOptions, timing: TimingOptions, conversion: Conversion, compute: ComputeOptions) -> Plan:
    """Return the plan of a sweep; options that were not given have the plan's defaults.

    Raises:
        OptionError: a list cannot be parsed, or has several numbers where only one is allowed.
        BackendUnavailableError: a name is not the name of a backend.
    """
    from mlx_engine.bench.lists import numbers
    from mlx_engine.bench.sweep_plan import BUDGET, Plan

    gens = numbers("-n", tests.n_gen, [Plan.n_gen])
    if len(gens) != 1:
        raise OptionError(option="-n", expected="one number with --sweep", found=",".join(map(str, gens)))
    plan = Plan(
        prompts=numbers("-p", tests.n_prompt, []) or None,
        n_gen=gens[0],
        quant=conversion,
        threads=compute.threads,
        allow_settings=compute.allow_settings,
        allow_too_large=compute.allow_too_large,
        repetitions=timing.repetitions,
        budget=BUDGET if timing.budget is None else timing.budget,
        backends=None if tests.backend is None else names_of(tests.backend),
    )
    plan.rungs()
    return plan
