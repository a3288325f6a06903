"""Questions that the plugin asks before the supervisor is loaded: their answers are used once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_resilience.errors import SlurmUnreachable
from slurm_resilience.resume.call.questions import Questions
from slurm_resilience.slurm import cli, command_words
from slurm_resilience.slurm.cli import CliClient
from slurm_resilience.slurm.early_questions import EarlyQuestions

SOURCE = (Path(__file__).parents[2] / "spank" / "early_questions.c").read_text()
CONFIG = "ClusterName = {name}\nSlurmctldHost[0] = n0\n"


class Plugin:
    """Starts commands as the plugin does, and tells of them."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.pids: list[int] = []

    def start(self, *argv: str) -> None:
        output, errors = (os.memfd_create(name) for name in ("output", "errors"))
        actions = [(os.POSIX_SPAWN_DUP2, output, 1), (os.POSIX_SPAWN_DUP2, errors, 2)]
        pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions)
        self.pids.append(pid)
        self.entries.append("\x1f".join(map(str, (pid, output, errors, *argv))))

    @property
    def told(self) -> str:
        return "\x1e".join(self.entries)

    def left(self) -> list[int]:
        """Those of its children that nobody has waited for."""
        found = []
        for pid in self.pids:
            try:
                os.waitpid(pid, os.WNOHANG)
                found.append(pid)
            except ChildProcessError:
                pass
        return found


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    made = Plugin()
    yield made
    assert made.left() == []


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A directory with a scontrol that prints a configuration, and counts its calls."""
    text = CONFIG.format(name="asked-again")
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho >> {tmp_path}/calls\nprintf '{text}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    return tmp_path


def config_words(slurm: Path) -> tuple[str, ...]:
    program, *words = command_words.SHOW_CONFIG
    return (str(slurm / program), *words)


def test_an_early_answer_is_taken_once(plugin: Plugin, slurm: Path) -> None:
    plugin.start(*config_words(slurm))
    client = CliClient(str(slurm), early=EarlyQuestions(plugin.told))
    assert client.info().cluster == "asked-again"
    assert (slurm / "calls").read_text() == "\n"
    assert client.info().cluster == "asked-again"
    assert (slurm / "calls").read_text() == "\n\n"


def test_a_command_with_other_words_is_not_taken(plugin: Plugin, slurm: Path) -> None:
    """The plugin may be of another release than the supervisor."""
    plugin.start(*config_words(slurm), "--oneliner")
    early = EarlyQuestions(plugin.told)
    assert CliClient(str(slurm), early=early).info().cluster == "asked-again"
    assert early
    early.close()
    assert not early


def test_one_that_failed_tells_why(plugin: Plugin, slurm: Path) -> None:
    (slurm / "scontrol").write_text(
        "#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1\n"
    )
    plugin.start(*config_words(slurm))
    with pytest.raises(SlurmUnreachable, match="Unable to contact"):
        CliClient(str(slurm), early=EarlyQuestions(plugin.told)).info()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_one_that_hangs_is_ended(
    plugin: Plugin, slurm: Path, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:

        def fails(pid: int, flags: int = 0) -> int:
            raise OSError("before Linux 5.3")

        monkeypatch.setattr(os, "pidfd_open", fails)
    (slurm / "scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    plugin.start(*config_words(slurm))
    with pytest.raises(SlurmUnreachable, match=r"no answer within 0\.1 s"):
        CliClient(str(slurm), timeout=0.1, early=EarlyQuestions(plugin.told)).info()


def test_those_that_nobody_takes_are_ended(plugin: Plugin) -> None:
    plugin.start("/bin/sleep", "600")
    plugin.start("/bin/true")
    EarlyQuestions(plugin.told).close()


def test_a_process_that_is_no_child_is_left_alone(slurm: Path) -> None:
    """The variable may come from somewhere else than the plugin, or the child may be gone."""
    grandchild = subprocess.run(
        [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '60'],"
         "stdout=subprocess.DEVNULL).pid)"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    pid = int(grandchild.stdout)
    try:
        output, errors = os.memfd_create("output"), os.memfd_create("errors")
        told = "\x1f".join(map(str, (pid, output, errors, *config_words(slurm))))
        early = EarlyQuestions(told)
        assert CliClient(str(slurm), early=early).info().cluster == "asked-again"
        output, errors = os.memfd_create("output"), os.memfd_create("errors")
        EarlyQuestions("\x1f".join(map(str, (pid, output, errors, "sleep")))).close()
        os.kill(pid, 0)
    finally:
        os.kill(pid, 9)


@given(st.text(alphabet=st.sampled_from("0159\x1e\x1f- aé٣")))
def test_what_is_no_list_of_commands_is_passed_over(told: str) -> None:
    # Numbers of processes and files that there are would be taken.
    told = re.sub(r"\d", "9" * 8, told)
    early = EarlyQuestions(told)
    assert not early
    assert early.answer(("scontrol",), 1.0) is None


def test_the_mark_of_a_job_is_read_from_its_question(plugin: Plugin, slurm: Path) -> None:
    base = command_words.list_jobs(*command_words.one_job(7))
    plugin.start("/bin/true", *base[1:], "-o", command_words.job_format("<0123>"))
    early = EarlyQuestions(plugin.told)
    assert early.mark((*base[1:], "-o")) == "<0123>"
    assert early.mark(("-j", "8", "-o")) == ""
    early.close()


def test_questions_whose_commands_run_need_no_threads() -> None:
    asked: list[int] = []
    with Questions(beside=False) as questions:
        question = questions.ask(lambda: asked.append(1))
        assert asked == []
        question.answer()
        question.answer()
    assert asked == [1]


def words_in(name: str) -> set[str]:
    found = re.search(rf"{name}\[\] = \{{(.*?)\}};", SOURCE, re.DOTALL)
    assert found is not None
    return set(re.findall(r'"([^"]*)"', found[1]))


def test_the_plugin_asks_with_the_words_and_in_the_environment_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert f'#define JOB_FIELDS "{command_words.JOB_FIELDS}"' in SOURCE
    assert f'#define JOB_COLUMNS "{command_words.JOB_COLUMNS}"' in SOURCE
    assert command_words.JOB_COLUMNS + ",Exclusive:8" == command_words.JOB_COLUMNS_EXCLUSIVE
    for words in (command_words.SHOW_CONFIG, command_words.SHOW_NODES, command_words.HELP_FORMAT):
        assert ", ".join(f'"{word}"' for word in words) in SOURCE
    kept = {name.rstrip("=") for name in words_in("kept")}
    dropped = words_in("dropped") - {"LC_ALL="}
    for name in os.environ:
        monkeypatch.delenv(name)
    for name in (*kept, *(prefix + "X" for prefix in dropped), "HOME"):
        monkeypatch.setenv(name, "x")
    left = {"HOME": "x", "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    assert cli.environment() == left | dict.fromkeys(kept, "x")
    assert len(kept) == 3
    assert len(dropped) == 7
