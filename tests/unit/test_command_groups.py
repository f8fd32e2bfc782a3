"""Groups of options: a dataclass in a command's signature stands for its fields."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from mlx_engine.commands.options.groups import flags_given, takes_groups


@dataclass(frozen=True)
class Size:
    """A base class, whose options come first."""

    name: Annotated[str, typer.Argument(help="A name.")] = "x"
    width: Annotated[int, typer.Option("--width", "-w", help="A width.")] = 3


@dataclass(frozen=True)
class Shape(Size):
    """More options of the same subject."""

    tags: Annotated[list[str] | None, typer.Option("--tag", help="A tag.")] = None
    round: Annotated[bool | None, typer.Option("--round/--no-round", help="Whether it is round.")] = None


def run(*args):
    """Run a command with a group between two plain options; return what it was called with."""
    calls, app = [], typer.Typer()

    @app.command()
    @takes_groups
    def command(
        *,
        first: Annotated[str, typer.Option("--first")] = "a",
        shape: Shape,
        last: Annotated[bool, typer.Option("--last")] = False,
    ) -> None:
        """Do nothing."""
        calls.append((first, shape, last))

    result = CliRunner().invoke(app, list(args))
    return result, calls


def test_fields_that_are_not_given_have_their_defaults():
    assert run()[1] == [("a", Shape(), False)]


def test_a_group_is_made_of_what_was_given():
    given = run("n", "-w", "5", "--tag", "b", "--tag", "c", "--no-round", "--first", "z", "--last")[1]
    assert given == [("z", Shape("n", 5, ["b", "c"], round=False), True)]


def test_the_help_lists_the_fields_in_the_place_of_the_group():
    text = run("--help")[0].output
    places = [text.index(f"--{name}") for name in ("first", "last", "width", "tag", "round")]
    assert places == sorted(places)
    assert "A width." in text
    assert places[1] < text.rindex("More options of the same subject") < places[2]


def test_a_value_of_another_type_is_wrong_use():
    result, calls = run("-w", "wide")
    assert (result.exit_code, calls) == (2, [])


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        (Shape(), {}),
        (Shape(tags=[]), {}),
        (Shape(width=0, tags=["a"]), {"width": "-w", "tags": "--tag"}),
        (Shape(round=False), {"round": "--round or --no-round"}),
    ],
    ids=repr,
)
def test_flags_of_what_is_not_at_its_default(shape, flags):
    assert flags_given(shape) == flags
