"""A supervisor whose srun has a plugin of another release: it does without, and says so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from slurm_resilience.resume.call.call_check import _has_plugin, still_has_plugin
from slurm_resilience.resume.srun.env_option import PROTOCOL
from slurm_resilience.resume.srun.srun_options import BUILTIN, parse_help, plugin_protocol

HELP = """\
Options provided by plugins:
      --auto-resume=N         1: start the step again after a node failure{mark}
      --other=N               a plugin of the site's (v77)
"""


@pytest.mark.parametrize(
    ("mark", "protocol", "used", "lines"),
    [
        (f" (v{PROTOCOL})", PROTOCOL, True, 0),
        (f"\n                              (v{PROTOCOL})", PROTOCOL, True, 0),
        ("", 0, False, 1),
        (f" (v{PROTOCOL + 1})", PROTOCOL + 1, False, 1),
    ],
)
def test_only_a_plugin_of_the_same_protocol_is_used(
    mark: str, protocol: int, used: bool, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    text = HELP.format(mark=mark)
    assert plugin_protocol(text) == protocol
    table = msgspec.structs.replace(BUILTIN.extended(parse_help(text)), plugin_protocol=protocol)
    assert _has_plugin(table) is used
    said = capfd.readouterr().err
    assert said.count("\n") == lines
    assert ("install the same release of both" in said) is not used


def test_a_site_without_the_plugin_is_told_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert not _has_plugin(BUILTIN.extended(parse_help("      --other=N  (v1)")))
    assert capfd.readouterr().err == ""


def test_an_srun_that_does_not_tell_has_not_lost_its_plugin(tmp_path: Path) -> None:
    """slurmctld is away, or the directory is gone in which srun was started."""
    srun = tmp_path / "srun"
    answers = {"exit 1": None, "echo '  -n, --ntasks=N  tasks'": False}
    for body, found in answers.items():
        srun.write_text(f"#!/bin/sh\n{body}\n")
        srun.chmod(0o755)
        assert still_has_plugin(str(srun), {}) is found
