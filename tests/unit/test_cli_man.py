"""The man pages say what the code does: every command, option, key and default is in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import msgspec
import pytest

from slurm_resilience import errors
from slurm_resilience.cli.main import cli
from slurm_resilience.config import Config, SinkSettings

PAGES = Path(__file__).resolve().parents[2] / "docs" / "man"


def page(name: str) -> str:
    """The text as a reader sees it, roughly: without macros, fonts and escapes."""
    text = (PAGES / name).read_text()
    text = re.sub(r"^\.(?:BR|RB|IR|RI|B|I|BI) ", "", text, flags=re.M)
    text = re.sub(r"\\f[BIRP]", "", text).replace("\\(dq", "\x00").replace("\\-", "-")
    return " ".join(text.replace('"', "").replace("\x00", '"').split())


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group) and name != "lab":
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


@pytest.mark.parametrize(("path", "command"), list(commands(cli, "sres")))
def test_every_command_and_option_is_in_the_page(path: str, command: click.Command) -> None:
    text = page("sres.1")
    assert path in text
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert any(option in text for option in parameter.opts), (path, parameter.opts)


def test_every_key_is_in_the_page_with_its_default() -> None:
    text = page("sres.toml.5")
    for field in msgspec.structs.fields(Config):
        table = getattr(Config(), field.name)
        if not isinstance(table, msgspec.Struct):
            assert f"{field.name} = " in text
            continue
        for key in msgspec.structs.fields(type(table)):
            value = msgspec.json.encode(getattr(table, key.name)).decode().replace(",", ", ")
            assert f"{key.name} = {value}" in text, f"{field.name}.{key.name}"


def test_every_key_of_a_sink_is_in_the_page() -> None:
    text = page("sres.toml.5")
    for key in msgspec.structs.fields(SinkSettings):
        assert f"{key.name} = " in text, key.name


def test_every_exit_code_is_in_the_page() -> None:
    text = (PAGES / "sres.1").read_text()
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.SresError):
            assert f"\n{error.exit_code};" in text
