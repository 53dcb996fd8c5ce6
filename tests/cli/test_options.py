"""Groups of options: a dataclass parameter becomes an option for each of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from patchkv_agents.cli.options import AsJson, with_option_groups


@dataclass(frozen=True)
class Sizes:
    width: Annotated[int, typer.Option(min=1, help="Columns of it.")] = 3
    names: Annotated[list[str] | None, typer.Option("--name")] = None


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()

    @app.command()
    @with_option_groups
    def command(thing: str, sizes: Sizes, as_json: AsJson = False) -> None:
        """Say what was given."""
        print(thing, sizes, as_json)

    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_a_group_is_given_whole_with_its_defaults() -> None:
    assert run("a") == (0, f"a {Sizes()} False\n")
    given = run("--name", "x", "a", "--width", "5", "--json", "--name", "y")
    assert given == (0, f"a {Sizes(5, ['x', 'y'])} True\n")


def test_the_fields_are_checked_and_explained_as_options_are() -> None:
    status, shown = run("a", "--width", "0")
    assert status == 2 and "--width" in shown
    status, shown = run("--help")
    assert status == 0 and "Say what was given" in shown and "Columns of it" in shown
