"""The documents about training say what the code does: options, flags, recipes, faults."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

import click
import msgspec
import pytest
from test_cli_man import page

from slurm_resilience.launcher import exit_codes
from slurm_resilience.launcher.main import cli
from slurm_resilience.launcher.recipe_file import Recipe
from slurm_resilience.training import inject
from slurm_resilience.training.rank_environment import PARTS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "training.md").read_text()


def rows(title: str) -> dict[str, list[str]]:
    """The first table under a heading: first cell (without ticks) → the others."""
    body = re.split(r"^##? ", TEXT.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.M)[0]
    lines = [line for line in body.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_table_has_every_option_with_its_default() -> None:
    from slurm_resilience.training.options import Options

    written = {name: cells[0].strip("`") for name, cells in rows("Options of `resilient`").items()}
    true = {
        field.name: '""' if field.default == "" else repr(field.default)
        for field in dataclasses.fields(Options)
    }
    assert written == true


def test_every_option_is_in_the_docstring() -> None:
    from slurm_resilience.training.block import resilient
    from slurm_resilience.training.options import Options

    arguments = (resilient.__doc__ or "").partition("Args:")[2].partition("Returns:")[0]
    told = set(re.findall(r"^ {8}(\w+): ", arguments, re.M))
    assert told == {field.name for field in dataclasses.fields(Options)}


def test_every_part_fault_and_phase_is_told() -> None:
    assert tuple(rows("The four parts alone")) == PARTS
    drills = TEXT.partition("\n## Drills\n")[2].partition("\n## ")[0].split()
    words = {word.strip("`.,;()") for word in drills}
    assert {*get_args(inject.Fault), *get_args(inject.Phase)} <= words


def test_every_variable_that_a_process_reads_is_in_the_table() -> None:
    rooms = ROOT / "slurm_resilience" / "training"
    code = (rooms / "rank_environment.py").read_text() + (
        rooms.parent / "launcher" / "control_socket.py"
    ).read_text()
    told = set(re.findall(r"SRES_[A-Z_]+", TEXT.partition("## Environment of a training")[2]))
    assert set(re.findall(r'"(SRES_[A-Z_]+)"', code)) <= told


@pytest.mark.parametrize("file", ["README.md", "docs/training.md"])
def test_examples_can_be_read(file: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", (ROOT / file).read_text(), re.S)
    assert examples
    for number, example in enumerate(examples):
        compile(example, f"{file}, example {number}", "exec")


LINKED = ["README.md", "docs/training.md", "docs/training-rules.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize("file", LINKED)
def test_links_lead_somewhere(file: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / file).read_text()):
        assert ((ROOT / file).parent / target).exists(), target


def test_every_flag_of_the_launcher_is_in_its_page_with_its_default() -> None:
    text = page("sres-run.1")
    for parameter in cli.params:
        if not isinstance(parameter, click.Option):
            continue
        for name in parameter.opts:
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), name
        if parameter.show_default:
            part = text.partition(f"{parameter.opts[0]} ")[2]
            assert part.index(f"Default: {parameter.default}.") < 160, parameter.opts


def test_every_key_of_a_recipe_is_in_the_page_with_its_default() -> None:
    text = page("sres-run.1")
    for table in msgspec.structs.fields(Recipe):
        section = getattr(Recipe(), table.name)
        # A table ends where the next one, or the text after the last, begins.
        part = re.split(r" \[[a-z]+\] ", text.partition(f"[{table.name}] ")[2], maxsplit=1)[0]
        for key in msgspec.structs.fields(type(section)):
            value = msgspec.json.encode(getattr(section, key.name)).decode().replace(",", ", ")
            assert f"{key.name} = {value}" in part, f"{table.name}.{key.name}"


def test_the_launchers_own_codes_are_in_the_page() -> None:
    text = page("sres-run.1")
    for code in (exit_codes.DONE, exit_codes.POISONED, exit_codes.STOP, exit_codes.KILLED_BY_HAND):
        assert f" {code} " in text
