"""Questions that the plugin asks before the supervisor is loaded: their answers are used once."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
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


ASKER = """
import os, sys
end, *commands = sys.argv[1:]
pids = []
for command in commands:
    output, errors, *argv = command.split("\\x1f")
    actions = [(os.POSIX_SPAWN_DUP2, int(output), 1), (os.POSIX_SPAWN_DUP2, int(errors), 2)]
    pids.append(os.posix_spawn(argv[0], argv, os.environ, file_actions=actions))
for _ in pids:
    pid, status = os.wait()
    told = pids.index(pid), status
    os.write(int(end), b"".join(number.to_bytes(4, sys.byteorder) for number in told))
"""


class Plugin:
    """Has commands started as the plugin does, and tells of them."""

    def __init__(self) -> None:
        self.pid = 0

    def start(self, *commands: Sequence[str]) -> str:
        """Return what is told of them."""
        ends, end = os.pipe()
        entries, kept = [], [end]
        for argv in commands:
            files = [os.memfd_create(name) for name in ("output", "errors")]
            entries.append("\x1f".join(map(str, (*files, *argv))))
            kept += files
        words = [sys.executable, "-I", "-S", "-c", ASKER, str(end), *entries]
        for file in kept:
            os.set_inheritable(file, True)
        self.pid = os.posix_spawn(words[0], words, os.environ, setpgroup=0)
        os.close(end)
        return "\x1e".join([f"{self.pid}\x1f{ends}", *entries])


@pytest.fixture
def plugin() -> Iterator[Plugin]:
    made = Plugin()
    yield made
    # The processes that were killed are gone when init has taken them away.
    with contextlib.suppress(ProcessLookupError):
        for _ in range(600):
            os.killpg(made.pid, 0)
            threading.Event().wait(0.1)
        pytest.fail("commands are left")


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
    early = EarlyQuestions(plugin.start(["/bin/true"], config_words(slurm)))
    client = CliClient(str(slurm), early=early)
    assert client.info().cluster == "asked-again"
    assert (slurm / "calls").read_text() == "\n"
    assert client.info().cluster == "asked-again"
    assert (slurm / "calls").read_text() == "\n\n"
    early.close()


def test_a_command_with_other_words_is_not_taken(plugin: Plugin, slurm: Path) -> None:
    """The plugin may be of another release than the supervisor."""
    early = EarlyQuestions(plugin.start([*config_words(slurm), "--oneliner"]))
    assert CliClient(str(slurm), early=early).info().cluster == "asked-again"
    assert early
    early.close()
    assert not early


def test_one_that_failed_tells_why(plugin: Plugin, slurm: Path) -> None:
    said = "Unable to contact slurm controller"
    (slurm / "scontrol").write_text(f"#!/bin/sh\necho {said} >&2; exit 1\n")
    early = EarlyQuestions(plugin.start(config_words(slurm)))
    with contextlib.closing(early), pytest.raises(SlurmUnreachable, match=said):
        CliClient(str(slurm), early=early).info()


def test_one_that_a_signal_ended_is_asked_again(plugin: Plugin, slurm: Path) -> None:
    command = slurm / "scontrol"
    usual = command.read_text()
    command.write_text("#!/bin/sh\nkill -KILL $$\n")
    with contextlib.closing(EarlyQuestions(plugin.start(config_words(slurm)))) as early:
        assert select.select([early._ends], [], [], 30)[0], "it has ended"
        command.write_text(usual)
        assert CliClient(str(slurm), early=early).info().cluster == "asked-again"


def test_one_that_hangs_is_ended(plugin: Plugin, slurm: Path) -> None:
    (slurm / "scontrol").write_text("#!/bin/sh\nexec sleep 600\n")
    early = EarlyQuestions(plugin.start(config_words(slurm)))
    with contextlib.closing(early), pytest.raises(SlurmUnreachable, match=r"within 0\.1 s"):
        CliClient(str(slurm), timeout=0.1, early=early).info()


def test_those_that_nobody_takes_are_ended(plugin: Plugin) -> None:
    EarlyQuestions(plugin.start(["/bin/sleep", "600"], ["/bin/true"])).close()


def test_one_whose_end_nobody_tells_is_asked_again(plugin: Plugin, slurm: Path) -> None:
    """The process that waits for the commands was killed, where memory is short, say."""
    told = plugin.start(["/bin/sleep", "600"])
    os.killpg(plugin.pid, 9)
    told = told.replace("/bin/sleep\x1f600", "\x1f".join(config_words(slurm)))
    with contextlib.closing(EarlyQuestions(told)) as early:
        assert CliClient(str(slurm), early=early).info().cluster == "asked-again"


def test_a_process_that_is_no_child_is_left_alone() -> None:
    """The variable may come from somewhere else than the plugin."""
    code = (
        "import subprocess as s; "
        "print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL, process_group=0).pid)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    ends, end = os.pipe()
    try:
        EarlyQuestions(f"{shown.strip()}\x1f{ends}").close()
        os.kill(int(shown), 0)
    finally:
        os.kill(int(shown), 9)
        os.close(end)


@given(st.text(alphabet=st.sampled_from("0159\x1e\x1f- aé٣")))
def test_what_is_no_list_of_commands_is_passed_over(told: str) -> None:
    # Numbers of processes and files that there are would be taken.
    told = re.sub(r"\d", "9" * 8, told)
    early = EarlyQuestions(told)
    assert not early
    assert early.answer(("scontrol",), 1.0) is None


def test_the_mark_of_a_job_is_read_from_its_question(plugin: Plugin) -> None:
    base = command_words.list_jobs(*command_words.one_job(7))
    question = ["/bin/true", *base[1:], "-o", command_words.job_format("<0123>")]
    early = EarlyQuestions(plugin.start(question))
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
    dropped = words_in("dropped") - {"LC_ALL=", "TZ="}
    for name in os.environ:
        monkeypatch.delenv(name)
    for name in (*kept, *(prefix + "X" for prefix in dropped), "HOME"):
        monkeypatch.setenv(name, "x")
    left = {"HOME": "x", "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "TZ": "UTC0"}
    assert all(f'"{name}={left[name]}"' in SOURCE for name in left if name != "HOME")
    assert cli.environment() == left | dict.fromkeys(kept, "x")
    assert len(kept) == 3
    assert len(dropped) == 7
