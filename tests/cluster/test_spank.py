"""The SPANK plugin on real Slurm: the hand-over, the refusals, and what tasks see.

The supervisor is a stand-in here: a script that writes down how it was started, and then starts the
real srun as docs/architecture.md says.
"""

from __future__ import annotations

import base64
import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_resilience.errors import UsageError
from slurm_resilience.lab import Lab, LabSpec
from slurm_resilience.resume.srun.env_option import (
    LOCALID,
    MASTER_ADDR,
    MASTER_NODE,
    NNODES,
    NODEID,
    NODELIST,
    PORT,
    PROCID,
    PROTOCOL,
    decode,
    encode,
    option_value,
)
from slurm_resilience.resume.srun.srun_options import (
    BUILTIN,
    Takes,
    parse_help,
    plugin_protocol,
    read_table,
    split,
)
from slurm_resilience.resume.srun.task_reports import StepReports, TaskReports
from slurm_resilience.slurm.command_words import (
    HELP_FORMAT,
    JOB_COLUMNS,
    JOB_COLUMNS_EXCLUSIVE,
    SHOW_CONFIG,
    SHOW_NODES,
    job_format,
    list_jobs,
    one_job,
)
from slurm_resilience.slurm.hostlists import expand, fold
from slurm_resilience.slurm.parse import has_exclusive_column

SPANK = Path(__file__).resolve().parents[2] / "spank"
# No shell: it would clear the signal mask that is looked at here.
SUPERVISOR = f"""\
#!{Path(sys.executable).resolve()} -IS
import os, sys, tempfile
record = tempfile.mkdtemp(dir=os.environ["RECORDS"])
for name in ("cmdline", "environ", "status"):
    with open(f"/proc/self/{{name}}", "rb") as source, open(f"{{record}}/{{name}}", "wb") as copy:
        copy.write(source.read())
_, flag, srun, dashes, *words = sys.argv
assert (flag, dashes) == ("--srun", "--")
if not os.environ.get("RECORD_ONLY"):
    os.environ["SRES_SUPERVISED"] = "1"
    if "REPORT_TO" in os.environ:
        os.environ["SLURM_SPANK__SLURM_SPANK_OPTION_sres_sres_report"] = os.environ.pop("REPORT_TO")
    os.execv(srun, [srun, "--sres-env=" + os.environ["CARRIER"], *words])
"""


@dataclass(frozen=True)
class Record:
    """The arguments and environment with which the stand-in was started."""

    argv: list[str]
    environ: dict[str, str]
    blocked: int

    @classmethod
    def read(cls, directory: Path) -> Record:
        def words(name: str) -> list[str]:
            return os.fsdecode((directory / name).read_bytes()).split("\0")[:-1]

        blocked = re.search(r"^SigBlk:\s*(\w+)", (directory / "status").read_text(), re.MULTILINE)
        assert blocked is not None
        environ = dict(word.split("=", 1) for word in words("environ"))
        # The interpreter and its option come before the script.
        return cls(words("cmdline")[2:], environ, int(blocked[1], 16))


@dataclass(frozen=True)
class Site:
    """A cluster whose plugstack.conf the tests may write."""

    lab: Lab
    allocation: str
    supervisor: Path
    records: Path

    @property
    def version(self) -> str:
        """The release of its Slurm, such as ``22.05.8``."""
        return self.lab.run(["srun", "--version"], check=True).stdout.split()[-1]

    @property
    def plugstack(self) -> Path:
        return self.lab.directory / "etc" / "plugstack.conf"

    @property
    def environment(self) -> dict[str, str]:
        return {"RECORDS": str(self.records), "SLURM_JOB_ID": self.allocation}

    def load(self, arguments: str | None = None) -> None:
        """Write plugstack.conf: the plugin with ``arguments``, by default the stand-in."""
        words = f"supervisor={self.supervisor}" if arguments is None else arguments
        self.plugstack.write_text(f"optional {self.lab.directory}/sres.so {words}\n")

    def run(
        self, *argv: str, env: Mapping[str, str] | None = None, text: str = ""
    ) -> subprocess.CompletedProcess[str]:
        return self.lab.run(argv, env={**self.environment, **(env or {})}, input=text)

    def srun(
        self, *args: str, carrier: Mapping[str, str] | None = None, text: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        return self.run(
            "srun", *args, env={**env, "CARRIER": option_value(carrier or {})}, text=text
        )

    def flagged(
        self, *args: str, carrier: Mapping[str, str] | None = None, text: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        return self.srun("--auto-resume=1", *args, carrier=carrier, text=text, **env)

    def handed_over(self) -> list[Record]:
        return [Record.read(directory) for directory in sorted(self.records.iterdir())]


@pytest.fixture(scope="module")
def cluster(built_plugin: Path, shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    lab = shared_lab(LabSpec(nodes=2, daemons=False, plugin=built_plugin, lifecycle=None))
    # Where a plain user can load it too.
    shutil.copy(built_plugin, lab.directory / "sres.so")
    return lab


@pytest.fixture(scope="module")
def allocation(cluster: Lab) -> Iterator[str]:
    """A job of half of each node, for srun to make its steps in."""
    words = ("salloc", "--no-shell", "-N2", "--ntasks-per-node=2")
    granted = re.search(r"job allocation (\d+)", cluster.run(words).stderr)
    assert granted is not None
    yield granted[1]
    cluster.run(("scancel", granted[1]))


@pytest.fixture
def site(cluster: Lab, allocation: str, tmp_path: Path) -> Site:
    supervisor, records = tmp_path / "supervisor", tmp_path / "records"
    supervisor.write_text(SUPERVISOR)
    supervisor.chmod(0o755)
    records.mkdir()
    site = Site(cluster, allocation, supervisor, records)
    site.load()
    return site


def lines(result: subprocess.CompletedProcess[str]) -> list[str]:
    assert result.returncode == 0, result.stderr
    return sorted(result.stdout.splitlines())


# --- the hand-over --------------------------------------------------------------------------------


def test_srun_becomes_the_supervisor_with_its_own_words(site: Site) -> None:
    words = ["-n1", "echo", "", "a b", "ü", "-n", "--auto-resume=banana", "\n", "--"]
    result = site.flagged(*words, "end")
    assert (result.returncode, result.stdout[-4:]) == (0, "end\n")
    (record,) = site.handed_over()
    srun = os.path.realpath(shutil.which("srun") or "")
    assert record.argv == [
        str(site.supervisor),
        "--srun",
        srun,
        "--",
        "--auto-resume=1",
        *words,
        "end",
    ]


@pytest.mark.parametrize("length", [4094, 4095, 4096, 4097, 8192, 8193, 100_000])
def test_command_lines_of_any_length(site: Site, length: int) -> None:
    before = "\0".join(["srun", "--auto-resume=1", "true", ""])
    filler = "x" * (length - len(before) - 1)
    site.flagged("true", filler, RECORD_ONLY="1")
    (record,) = site.handed_over()
    assert record.argv[4:] == ["--auto-resume=1", "true", filler]


def test_signals_reach_the_supervisor(site: Site) -> None:
    site.flagged("true")
    assert site.handed_over()[0].blocked == 0


def test_the_supervisor_has_the_users_environment(site: Site) -> None:
    site.flagged("true", SLURM_HINT="nomultithread", X_Y="a\nb")
    environ = site.handed_over()[0].environ
    assert (environ["SLURM_HINT"], environ["X_Y"]) == ("nomultithread", "a\nb")
    assert not [name for name in environ if "SPANK" in name or "SUPERVISED" in name]


def test_slurm_is_asked_before_the_supervisor_is_there(site: Site) -> None:
    """With the words that it would ask with itself: else it asks anew, and the step waits."""
    site.flagged("true", RECORD_ONLY="1")
    environ = site.handed_over()[0].environ
    entries = [entry.split("\x1f")[2:] for entry in environ["SRES_EARLY"].split("\x1e")[1:]]
    known = site.run("squeue", "--helpFormat").stdout
    columns = JOB_COLUMNS_EXCLUSIVE if has_exclusive_column(known) else JOB_COLUMNS
    jobs = list_jobs(*one_job(int(site.allocation)))
    asked = {" ".join(words) for words in entries}
    (mark,) = {words[-1].split("%")[0] for words in entries if "-o" in words[-2:-1]}
    assert re.fullmatch(r"<[0-9a-f]{16}>", mark)
    expected = [HELP_FORMAT, SHOW_CONFIG, SHOW_NODES, (*jobs, "-O", columns)]
    expected += [(*jobs, "-o", job_format(mark))]
    directory = Path(shutil.which("srun") or "").resolve().parent
    assert asked == {f"{directory}/{' '.join(words)}" for words in expected}


@pytest.mark.parametrize(
    "words",
    [["--auto-resume", "1"], ["--auto-res=1"], ["-n1", "-l", "--auto", "1"], ["-lQ", "--auto=1"]],
)
def test_every_way_to_write_the_flag(site: Site, words: list[str]) -> None:
    started = site.srun(*words, "true")
    if "is ambiguous" in started.stderr:
        pytest.skip(f"excused: {started.stderr.splitlines()[0]}")
    lines(started)
    assert site.handed_over()[0].argv[4:] == [*words, "true"]


def test_the_last_flag_counts(site: Site) -> None:
    lines(site.srun("--auto-resume=1", "--auto-resume=0", "true"))
    assert site.handed_over() == []
    lines(site.srun("--auto-resume=0", "--auto-resume=1", "true"))
    assert len(site.handed_over()) == 1


def test_a_heterogeneous_line_is_handed_over_whole(site: Site) -> None:
    words = ["-n1", "true", ":", "-n1", "--auto-resume=1", "true"]
    site.srun(*words, RECORD_ONLY="1")
    assert site.handed_over()[0].argv[4:] == words


PROGRAMS = {
    "exit 0": 0,
    "exit 7": 7,
    "exit 255": 255,
    "kill -KILL $$": 137,
    "kill -TERM $$": 143,
    "kill -SEGV $$": 139,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_end_of_the_program_is_sruns(site: Site, program: str) -> None:
    def messages(result: subprocess.CompletedProcess[str]) -> list[str]:
        # Now and then srun says one line more, with the plugin and without.
        own = [line for line in result.stderr.splitlines() if "you told me node" not in line]
        return sorted(re.sub(r"\d+", "N", line) for line in own)

    plain = site.srun("-n1", "-w", "n1", "sh", "-c", f"ulimit -c 0; {program}")
    flagged = site.flagged("-n1", "-w", "n1", "sh", "-c", f"ulimit -c 0; {program}")
    assert (plain.returncode, flagged.returncode) == (PROGRAMS[program],) * 2
    assert messages(plain) == messages(flagged)
    assert len(site.handed_over()) == 1


def test_a_signal_ends_both_alike(site: Site) -> None:
    def ended(*words: str) -> int:
        environment = {**site.environment, "CARRIER": option_value({})}
        program = ("-n1", "sh", "-c", "echo up; exec sleep 60")
        srun = site.lab.popen(["srun", *words, *program], env=environment, stdout=subprocess.PIPE)
        assert srun.stdout is not None
        assert srun.stdout.readline() == "up\n"
        srun.terminate()
        srun.communicate(timeout=30)
        return srun.returncode

    assert ended("--auto-resume=1") == ended()
    assert len(site.handed_over()) == 1


KILLED_BEFORE_ITS_SRUN = 3_999_999
"""The number of no process."""


def test_an_srun_ends_with_its_supervisor_however_early(
    site: Site, wait_for: Callable[..., bool]
) -> None:
    words = (f"--sres-env={option_value({})}", "-n1")
    gone = {"SRES_SUPERVISED": str(KILLED_BEFORE_ITS_SRUN)}
    result = site.srun(*words, "echo", "started", **gone)
    assert (result.returncode, result.stdout) == (1, "")
    begin = 'SRES_SUPERVISED=$$ "$@" & echo $!; wait'
    program = ("sh", "-c", "echo up; exec sleep 60")
    supervisor = site.lab.popen(
        ["sh", "-c", begin, "sh", "srun", *words, *program],
        env=site.environment,
        stdout=subprocess.PIPE,
    )
    assert supervisor.stdout is not None
    srun, up = sorted(supervisor.stdout.readline() for _ in range(2))
    assert up == "up\n"
    parent = site.lab.run(["ps", "-o", "ppid=", "-p", srun.strip()], check=True).stdout.strip()
    site.lab.run(["kill", "-9", parent], check=True)
    # Its output ends when srun has: it holds the same pipe.
    assert supervisor.communicate(timeout=30)[0] == ""
    steps = ["squeue", "-h", "-s", "-j", site.allocation, "-o", "%j"]
    wait_for(lambda: "sh" not in site.run(*steps).stdout.split(), 30, "the step is gone")


def test_a_program_may_stand_between_srun_and_its_supervisor(site: Site) -> None:
    between = 'SRES_SUPERVISED=$$ sh -c \'"$@"; exit $?\' sh "$@"; exit $?'
    words = ("srun", f"--sres-env={option_value({})}", "-n1", "echo", "started")
    assert lines(site.run("sh", "-c", between, "sh", *words)) == ["started"]


def test_a_plain_user_is_handed_over_too(site: Site) -> None:
    site.load("supervisor=/bin/echo")
    result = site.lab.run(["srun", "--auto-resume=1", "true"], user="alice", cwd="/")
    srun = os.path.realpath(shutil.which("srun") or "")
    assert (result.stdout, result.stderr) == (f"--srun {srun} -- --auto-resume=1 true\n", "")


def test_stdin_reaches_the_program(site: Site) -> None:
    text = "".join(f"line {number}\n" for number in range(5000))
    assert site.flagged("-n1", "cat", text=text).stdout == text


def test_no_task_sees_how_it_was_started(site: Site) -> None:
    names = {line.split("=")[0] for line in lines(site.flagged("env", carrier={"A": "1"}))}
    assert "A" in names
    assert not [name for name in names if "SPANK" in name or "SUPERVISED" in name]


def test_a_flagged_srun_in_a_task_is_handed_over_again(site: Site) -> None:
    nested = "srun --auto-resume=1 --overlap -n1 echo nested; srun --overlap -n1 echo plain"
    assert lines(site.flagged("-n1", "sh", "-c", nested)) == ["nested", "plain"]
    assert [record.argv[-1] for record in site.handed_over()].count("nested") == 1
    assert len(site.handed_over()) == 2


# --- what tasks see -------------------------------------------------------------------------------

AWKWARD = {"A": "x y;=%2F\"'\t$HOME", "ü": "é", "EMPTY": "", "NEWLINE": "a\nb", "RAW": "\udcff"}


def test_values_arrive_as_they_were(site: Site) -> None:
    result = site.flagged("-n1", "base64", "/proc/self/environ", carrier=AWKWARD)
    words = os.fsdecode(base64.b64decode(result.stdout)).split("\0")[:-1]
    environ = dict(word.split("=", 1) for word in words)
    assert AWKWARD.items() <= environ.items()


@pytest.mark.parametrize("export", ["--export=NONE", "--export=FOO=1", "--export=ALL,FOO=1"])
def test_values_arrive_whatever_is_exported(site: Site, export: str) -> None:
    result = site.flagged("-n1", export, "/usr/bin/env", carrier={"A": "1", "SLURM_NNODES": "77"})
    assert {"A=1", "SLURM_NNODES=77"} <= set(lines(result))


def test_each_task_has_its_own_ids(site: Site) -> None:
    own = {"N": NODEID, "P": PROCID, "L": LOCALID, "SLURM_PROCID": "x", "OTHER": "@nodeid"}
    program = "echo $SLURM_NODEID $N / $P / $SLURM_LOCALID $L / $SLURM_PROCID $OTHER"
    result = site.flagged("-N2", "-n4", "-m", "cyclic", "sh", "-c", program, carrier=own)
    assert lines(result) == [
        "0 0 / 0 / 0 0 / x @nodeid",
        "0 0 / 2 / 1 1 / x @nodeid",
        "1 1 / 1 / 0 0 / x @nodeid",
        "1 1 / 3 / 1 1 / x @nodeid",
    ]


STEP = {
    "LIST": NODELIST,
    "FIRST": MASTER_NODE,
    "ADDRESS": MASTER_ADDR,
    "COUNT": NNODES,
    "RENDEZVOUS": f"{PORT}9999",
}


@pytest.mark.parametrize("export", ["ALL", "NONE"])
def test_each_task_is_told_of_its_own_step(site: Site, export: str) -> None:
    values = STEP | {"@n2": "192.0.2.2", "@n1": "2001:db8::1"}
    program = "echo $SLURM_STEP_ID $LIST $FIRST $ADDRESS $COUNT $RENDEZVOUS"

    def told(*words: str) -> list[str]:
        step = (*words, f"--export={export}", "/bin/sh", "-c", program)
        (line,) = set(lines(site.flagged(*step, carrier=values)))
        number, *rest, port = line.split()
        assert int(port) == 20000 + (9999 + 7 * int(number)) % 10000
        return rest

    assert told("-N2", "-n2") == ["n[1-2]", "n1", "2001:db8::1", "2"]
    assert told("-N1", "-n2", "-w", "n2") == ["n2", "n2", "192.0.2.2", "1"]


def test_a_node_without_an_address_is_reached_by_its_name(site: Site) -> None:
    result = site.flagged("-n1", "-w", "n1", "sh", "-c", "echo $ADDRESS", carrier=STEP)
    assert lines(result) == ["n1"]


def test_an_address_is_no_variable(site: Site) -> None:
    shown = lines(site.flagged("-n1", "env", carrier=STEP | {"@n1": "192.0.2.1"}))
    assert not [line for line in shown if line.startswith("@")]


# --- what the supervisor is told ------------------------------------------------------------------


def reports_of(site: Site, program: str, *words: str, expected: int) -> StepReports:
    """Start a step, and return the words of slurmstepd on its tasks."""
    news = threading.Semaphore(0)
    reports = TaskReports().expect("127.0.0.1", news.release)
    step = ("-n2", "-N2", *words, "/bin/sh", "-c", f"ulimit -c 0; {program}")
    site.flagged(*step, carrier=STEP, REPORT_TO=reports.target)
    # Two nodes begin, and then each task ends.
    for _ in range(2 + expected):
        assert news.acquire(timeout=10), (reports.nodes(), reports.ends())
    return reports


@pytest.mark.parametrize("export", ["ALL", "NONE"])
@pytest.mark.parametrize(
    ("program", "code", "by_signal"),
    [("exit 0", 0, False), ("exit 5", 5, False), ("kill -SEGV $$", 139, True)],
)
def test_the_end_of_each_task_is_told(
    site: Site, program: str, code: int, by_signal: bool, export: str
) -> None:
    reports = reports_of(site, program, f"--export={export}", expected=2)
    assert reports.nodes() == ("n1", "n2")
    ends = sorted((end.task, end.node, end.code, end.by_signal) for end in reports.ends())
    assert ends == [(0, "n1", code, by_signal), (1, "n2", code, by_signal)]


def test_kill_on_bad_exit_hides_no_end(site: Site, tmp_path: Path) -> None:
    # srun forgets to end a task that it has not yet seen begin when another one fails.
    began = tmp_path / "began"
    lives = f'if [ "$SLURM_PROCID" = 0 ]; then sleep 1; : > {began}; exec sleep 60; fi'
    program = f"{lives}; until [ -e {began} ]; do sleep 0.1; done; exit 5"
    first = reports_of(site, program, "-K", expected=2).ends()[0]
    assert (first.task, first.node, first.code) == (1, "n2", 5)


def test_an_end_that_the_network_loses_is_told_again(site: Site) -> None:
    """The other tasks of one that crashed would wait for it without end."""
    heard: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(30)
        target = f"0123abcd,{listening.getsockname()[1]},127.0.0.1"
        program = ("-n1", "-N1", "/bin/sh", "-c", "ulimit -c 0; kill -SEGV $$")

        def listen() -> None:
            while len(heard) < 3:
                datagram, sender = listening.recvfrom(1000)
                _, _, kind, step, _, task, *_ = words = datagram.decode().split()
                if kind != "ended":
                    continue
                heard.append(" ".join(words))
                # The first is lost, and so is the answer to the second.
                text = f"sres1 {'0123abcd' if len(heard) == 3 else 'ffff'} heard {step} {task}"
                listening.sendto(text.encode(), sender)

        listener = threading.Thread(target=listen)
        listener.start()
        site.flagged(*program, carrier=STEP, REPORT_TO=target)
        listener.join(30)
    assert len(heard) == 3
    assert len(set(heard)) == 1


@pytest.mark.parametrize(
    "target",
    # Malformed ones, and two to which there is no way.
    f"|x|0a,1|0a,0,::1|0a,70000,::1|0a,9x,::1|0a,9,n1|xy,9,::1|{'a' * 65},9,::1|,9,::1|"
    "0a,9,192.0.2.1|0a,9,2001:db8::1".split("|"),
)
def test_a_supervisor_that_cannot_be_reached_harms_nothing(site: Site, target: str) -> None:
    result = site.flagged("-N2", "-n2", "echo", "fine", carrier=STEP, REPORT_TO=target)
    assert lines(result) == ["fine"] * 2
    assert result.stderr == ""


def test_no_task_sees_the_supervisors_secret(site: Site) -> None:
    target = "00112233,9,127.0.0.1"
    result = site.flagged("-n1", "env", carrier=STEP, REPORT_TO=target)
    assert not [line for line in lines(result) if "00112233" in line]


def test_the_batch_script_is_left_alone(
    site: Site, tmp_path: Path, wait_for: Callable[..., bool]
) -> None:
    output = tmp_path / "out"
    option = {"_SLURM_SPANK_OPTION_sres_sres_env": option_value({"A": "1", "SLURM_JOB_ID": "1"})}
    script = "#!/bin/sh\necho A=$A SLURM_JOB_ID=$SLURM_JOB_ID\n"
    job = site.run("sbatch", "--parsable", f"--output={output}", env=option, text=script)
    wait_for(lambda: output.exists() and output.read_text().endswith("\n"), 30, "its output")
    assert output.read_text() == f"A= SLURM_JOB_ID={job.stdout.strip()}\n"


def test_a_task_does_not_start_in_half_a_world(site: Site, tmp_path: Path) -> None:
    started = tmp_path / "started"
    # Past srun's own look at the option: as from another version of the plugin.
    broken = {"_SLURM_SPANK_OPTION_sres_sres_env": f"{PROTOCOL};A=1;B=%zz"}
    result = site.run("srun", "-n1", "touch", str(started), env=broken)
    assert result.returncode == 1
    assert "sres: the supervisor's environment could not be set" in result.stderr
    assert not started.exists()


@pytest.mark.parametrize("value", ["A=1", f"{PROTOCOL + 1};A=1", "x;A=1", "999999;A=1"])
def test_a_node_with_a_plugin_of_another_release_starts_no_task(
    site: Site, tmp_path: Path, value: str
) -> None:
    started = tmp_path / "started"
    other = {"_SLURM_SPANK_OPTION_sres_sres_env": value}
    result = site.run("srun", "-N1", "-n2", "touch", str(started), env=other)
    assert result.returncode == 1
    assert result.stderr.count(f"different releases (protocol {PROTOCOL} and ") == 1
    assert not started.exists()


# --- refusals -------------------------------------------------------------------------------------


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of an srun, sbatch or salloc that refused and started nothing."""
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    return line


@pytest.mark.parametrize("value", ["banana", "2", "", "1x", " 1", "-1", "yes"])
def test_other_values_are_refused(site: Site, value: str) -> None:
    assert refusal(site.srun(f"--auto-resume={value}", "echo", "started")) == (
        f"srun: error: sres: --auto-resume={value}: write 1 (on) or 0 (off)"
    )
    assert site.handed_over() == []


def test_the_exit_code_of_a_refusal_is_the_users_choice(site: Site) -> None:
    assert site.srun("--auto-resume=banana", "true", SLURM_EXIT_ERROR="9").returncode == 9


@pytest.mark.parametrize("value", ["A=1", f"{PROTOCOL + 1};A=1"])
def test_a_supervisor_of_another_release_is_refused(site: Site, value: str) -> None:
    line = refusal(site.srun(f"--sres-env={value}", "echo", "started", SRES_SUPERVISED="1"))
    assert (
        f"different releases (protocol {PROTOCOL} and " in line
        and "install the same release" in line
    )


def test_a_malformed_carrier_is_refused_before_anything_starts(site: Site) -> None:
    line = refusal(
        site.srun(f"--sres-env={PROTOCOL};A=%zz", "echo", "started", SRES_SUPERVISED="1")
    )
    assert line.startswith("srun: error: sres: --sres-env: malformed value")


# --- sbatch and salloc ----------------------------------------------------------------------------

PREPARED = {"no-kill": "set", "requeue": "requeue", "open-mode": "a"}
"""As `sbatch -v` prints the options that it was given."""


def options_of(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Return the options of a job that say what becomes of it when a node is lost."""
    assert result.returncode == 0, result.stderr
    found = re.findall(r"^\w+: (no-kill|requeue|open-mode) +: (.*)$", result.stderr, re.MULTILINE)
    return {name: value.strip() for name, value in found}


def submitted(site: Site, tmp_path: Path, flags: str, *words: str) -> dict[str, str]:
    """Return what became of the options of a script with these lines."""
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n{flags}\nsrun --auto-resume=1 true\n")
    return options_of(site.run("sbatch", "-v", "--hold", "-o", "/dev/null", *words, str(script)))


@pytest.mark.parametrize("flag", ["--auto-resume=1", "--auto-resume"])
def test_a_batch_job_is_prepared(site: Site, tmp_path: Path, flag: str) -> None:
    assert submitted(site, tmp_path, "") == {}
    assert submitted(site, tmp_path, f"#SBATCH {flag}") == PREPARED
    assert submitted(site, tmp_path, "", flag) == PREPARED
    wrapped = site.run("sbatch", "-v", "--hold", "-o", "/dev/null", flag, "--wrap", "true")
    assert options_of(wrapped) == PREPARED
    assert submitted(site, tmp_path, "", "--auto-resume=0") == {}


def test_the_users_own_choice_holds(site: Site, tmp_path: Path) -> None:
    own = "#SBATCH --no-requeue\n#SBATCH --open-mode=truncate\n#SBATCH --auto-resume=1\n"
    told = submitted(site, tmp_path, own)
    assert told["no-kill"] == "set" and told["open-mode"] == "t", told
    assert "requeue" not in told, told
    told = submitted(site, tmp_path, "#SBATCH --auto-resume=1", "--no-requeue")
    assert told["requeue"] == "no-requeue" and told["open-mode"] == "a", told
    told = options_of(
        site.run("sbatch", "-v", "--hold", "--auto-resume=1", text=f"#!/bin/sh\n{own}\n")
    )
    assert "open-mode" not in told or told["open-mode"] == "t", "it comes through a pipe"


def test_a_prepared_job_prepares_no_other(site: Site, tmp_path: Path, wait_for: Any) -> None:
    out = tmp_path / "out"
    words = ("--auto-resume=1", "-o", str(out), "--wrap", "env; echo over")
    assert site.run("sbatch", *words).returncode == 0
    wait_for(lambda: out.exists() and "over" in out.read_text(), 30, "the job has run")
    text = out.read_text()
    assert "SBATCH_" not in text and "error" not in text, text


def test_an_allocation_is_prepared(site: Site) -> None:
    words = ("salloc", "-v", "--auto-resume=1", "env")
    result = site.run(*words)
    assert options_of(result).get("no-kill") == "set", result.stderr
    assert "SALLOC_NO_KILL" not in result.stdout and "SBATCH_" not in result.stdout


def test_a_script_without_a_flagged_srun_is_told_so(site: Site, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH --auto-resume=1\n# srun --auto-resume=1\nsrun true\n")
    told = site.run("sbatch", "--hold", "-o", "/dev/null", str(script)).stderr
    assert "where the script says srun --auto-resume=1" in told
    other = refusal(site.run("sbatch", "--auto-resume=2", "--wrap", "true"))
    assert "write 1 (on) or 0 (off)" in other


@pytest.mark.parametrize(
    ("name", "why"), [("absent", "No such file"), ("data", "Permission denied")]
)
def test_a_supervisor_that_cannot_be_started(
    site: Site, tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "data").write_text("")
    site.load(f"supervisor={tmp_path / name}")
    line = refusal(site.flagged("echo", "started"))
    assert line.startswith(
        f"srun: error: sres: cannot start the supervisor {tmp_path / name}: {why}"
    )
    assert "install slurm-resilience" in line
    assert lines(site.srun("-n1", "echo", "plain")) == ["plain"]


def test_an_unknown_plugstack_argument(site: Site, wait_for: Callable[..., bool]) -> None:
    site.load("superviser=/usr/bin/true")
    assert refusal(site.flagged("echo", "started")) == (
        'srun: error: sres: plugstack.conf: unknown argument "superviser=/usr/bin/true"; '
        "the only one is supervisor=PATH"
    )
    # No other job suffers from it, but the administrator is told.
    plain = site.srun("-n1", "echo", "plain")
    assert (plain.returncode, plain.stdout, plain.stderr) == (0, "plain\n", "")
    site.lab.kill_daemon("slurmd", node="n2")
    site.lab.start_daemon("slurmd", node="n2")
    log = next(site.lab.directory.glob("nodes/n2/**/slurmd.log"))
    wait_for(lambda: 'sres: plugstack.conf: unknown argument "superv' in log.read_text(), 30, "it")
    site.lab.wait_states({"n2": "MIXED"})


# --- sruns that did not ask -----------------------------------------------------------------------


def test_an_srun_without_the_flag_is_as_without_the_plugin(site: Site) -> None:
    def steady(text: str) -> list[str]:
        # Ids, ports and the order of two tasks differ from one run to the next anyway.
        return sorted(re.sub(r"\d+", "N", line) for line in text.splitlines())

    def everything() -> tuple[int, list[str], list[str]]:
        result = site.srun("-N2", "-n2", "-l", "sh", "-c", "env; echo err >&2; exit 3")
        return result.returncode, steady(result.stdout), steady(result.stderr)

    with_plugin = everything()
    site.plugstack.write_text("")
    assert with_plugin == everything()
    assert site.handed_over() == []


def test_a_flag_in_the_environment_or_after_the_program_is_not_sruns_own(site: Site) -> None:
    job = {"SLURM_SPANK__SLURM_SPANK_OPTION_sres_auto_resume": "1"}
    assert lines(site.srun("-n1", "echo", "--auto-resume=1", **job)) == ["--auto-resume=1"]
    assert lines(site.srun("--auto-resume=0", "-n1", "echo", "off")) == ["off"]
    assert site.handed_over() == []


def test_help_lists_the_option(site: Site) -> None:
    text = site.srun("--help").stdout
    assert re.search(r"^ +--auto-resume=N +1: start the step again", text, re.M)
    assert plugin_protocol(text) == PROTOCOL
    assert "sres-env" not in text
    assert re.search(r"^ +--auto-resume=N +1: prepare", site.run("sbatch", "--help").stdout, re.M)


# --- the Python side, held against the real thing -------------------------------------------------

# --help is wrong about these, as seen on 22.05: it shows no value, or one that must be there.
MISLEADING = {"container", "kill-on-bad-exit", "no-kill", "bcast", "overlap", "resv-ports"}


def test_the_built_in_table_agrees_with_srun_help(site: Site) -> None:
    """tests/unit/test_recorded.py does the same with what other releases print."""
    listed = {spec.name: spec for spec in parse_help(site.srun("--help").stdout)}
    newer = not site.version.startswith("22.05")
    known = {spec.name: spec for spec in BUILTIN.specs if newer or not spec.spelled_out}
    assert listed.keys() <= known.keys()
    misleading = MISLEADING | ({"pty", "container-id"} if newer else set())
    shown = {
        name: (spec.takes, spec.short) for name, spec in listed.items() if name not in misleading
    }
    assert shown == {name: (known[name].takes, known[name].short) for name in shown}


def test_the_built_in_table_agrees_with_srun_itself(site: Site) -> None:
    """getopt tells: 'requires an argument', "doesn't allow an argument", or neither."""
    known = {spec.name: spec.takes for spec in BUILTIN.specs if not spec.spelled_out}
    # Neither line names a program, so nothing is started; what is asked is how the words are read.
    ask = 'for o; do echo "== $o"; srun --$o; srun --$o= --no-such-option; done 2>&1'
    seen, gone = dict[str, Takes](), list[str]()
    supervised = {"SRES_SUPERVISED": "1"}  # or --sres-env is unknown
    for answer in site.run("sh", "-c", ask, "sh", *known, env=supervised).stdout.split("== ")[1:]:
        name, said = answer.split("\n", 1)
        if f"unrecognized option '--{name}'" in said:
            gone.append(name)
        elif f"option '--{name}' requires an argument" in said:
            seen[name] = Takes.VALUE
        elif f"option '--{name}' doesn't allow an argument" in said:
            seen[name] = Takes.NOTHING
        else:
            seen[name] = Takes.ATTACHED
    if site.version.startswith("22.05"):
        assert (seen, gone) == (known, [])
        return
    # The table is that of 22.05. What counts is which options take the next word.
    takes_next = {name for name, takes in seen.items() if takes is Takes.VALUE}
    assert takes_next == {n for n, t in known.items() if t is Takes.VALUE and n not in gone}


def test_the_options_of_a_sites_plugins_are_read(site: Site) -> None:
    script = site.records / "srun"
    script.write_text(f"#!/bin/sh\nexec cat <<'END'\n{site.srun('--help').stdout}END\n")
    script.chmod(0o755)
    table = read_table(str(script))
    assert table.long("auto-resume").takes is Takes.VALUE
    command = split(["--auto-resume", "1", "-N2", "python", "-u"], table)
    assert command.program == ("python", "-u")


@pytest.fixture(scope="module")
def carrier_c(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("carrier") / "carrier.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SPANK / "env_option.c"], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.env_option_valid.restype = ctypes.c_bool
    return loaded


def decode_in_c(library: ctypes.CDLL, carrier: str) -> dict[str, str] | None:
    buffer = ctypes.create_string_buffer(carrier.encode())
    cursor = ctypes.c_char_p(ctypes.addressof(buffer))
    name, value = ctypes.c_char_p(), ctypes.c_char_p()
    arguments = (ctypes.byref(cursor), ctypes.byref(name), ctypes.byref(value))
    pairs: dict[str, str] = {}
    while (more := library.env_option_next(*arguments)) > 0:
        pairs[os.fsdecode(name.value or b"")] = os.fsdecode(value.value or b"")
    return pairs if more == 0 else None


data = st.binary(max_size=20).map(lambda data: data.replace(b"\0", b""))
texts = data.map(os.fsdecode)
names = data.map(lambda data: os.fsdecode(data.replace(b"=", b""))).filter(bool)


@settings(max_examples=500, deadline=None)
@given(pairs=st.dictionaries(names, texts))
def test_c_decodes_what_python_encodes(carrier_c: ctypes.CDLL, pairs: dict[str, str]) -> None:
    carrier = encode(pairs)
    assert decode_in_c(carrier_c, carrier) == pairs
    assert carrier_c.env_option_valid(carrier.encode())


@pytest.mark.parametrize(
    ("value", "protocol", "pairs"),
    [
        ("1;A=1", 1, "A=1"),
        ("1;", 1, ""),
        ("31;A=1;B=2", 31, "A=1;B=2"),
        ("A=1;B=2", 0, "A=1;B=2"),
        ("1A=1", 0, "1A=1"),
        ("12", 0, "12"),
        (";A=1", 0, ";A=1"),
        ("0;A=1", 0, "0;A=1"),
        ("99999999;A=1", 0, "99999999;A=1"),
        ("", 0, ""),
    ],
)
def test_c_tells_the_protocol(
    carrier_c: ctypes.CDLL, value: str, protocol: int, pairs: str
) -> None:
    carrier_c.env_option_pairs.restype = ctypes.c_char_p
    number = ctypes.c_uint()
    text = value.encode()
    rest = carrier_c.env_option_pairs(text, ctypes.byref(number))
    assert (number.value, rest.decode()) == (protocol, pairs)


@settings(max_examples=2000, deadline=None)
@given(carrier=st.text("Aa0=;%3DFé ~", max_size=12))
@example(carrier="A=%00")
@example(carrier="A%3DB=1")
@example(carrier="A=1;")
@example(carrier="A=%4a")
def test_c_refuses_what_python_refuses(carrier_c: ctypes.CDLL, carrier: str) -> None:
    try:
        expected = decode(carrier)
    except UsageError:
        expected = None
    assert decode_in_c(carrier_c, carrier) == expected
    assert carrier_c.env_option_valid(carrier.encode()) == (expected is not None)


# --- small parts in C -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_parts(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("parts") / "parts.so"
    # What they need of Slurm is there only inside its own programs, and is not called here.
    sources = [SPANK / name for name in ("step_view.c", "env_option.c", "memory_events.c")]
    flags = ["-D_GNU_SOURCE", "-shared", "-fPIC", "-Wl,-z,lazy"]
    subprocess.run(["cc", *flags, "-o", library, *sources], check=True)
    loaded = ctypes.CDLL(str(library), mode=os.RTLD_LAZY)
    loaded.first_host.restype = ctypes.c_bool
    loaded.first_host.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    loaded.memory_kills.restype = ctypes.c_long
    return loaded


def first_host(library: ctypes.CDLL, node_list: str, size: int = 256) -> str | None:
    buffer = ctypes.create_string_buffer(size)
    found = library.first_host(os.fsencode(node_list), buffer, size)
    return os.fsdecode(buffer.value) if found else None


hosts = st.lists(
    st.from_regex(r"[a-z]{1,3}(-[a-z]+)?[0-9]{0,4}", fullmatch=True), min_size=1, max_size=8
)


@settings(max_examples=500, deadline=None)
@given(names=hosts)
def test_c_finds_the_first_node_of_a_list(small_parts: ctypes.CDLL, names: list[str]) -> None:
    folded = fold(names)
    assert first_host(small_parts, folded) == expand(folded)[0]


@pytest.mark.parametrize(
    ("node_list", "first"),
    [
        ("n3,n1", "n3"),
        ("n[1-2]x[3-4],z", "n1x3"),
        ("gpu-[04-05]-ib", "gpu-04-ib"),
        *((malformed, None) for malformed in ("", ",n1", "n[1", "n[1-2", "n1]", "n[[1]]")),
    ],
)
def test_c_reads_any_list(small_parts: ctypes.CDLL, node_list: str, first: str | None) -> None:
    assert first_host(small_parts, node_list) == first


@settings(max_examples=1000, deadline=None)
@given(text=st.text("n1[]-,", max_size=12), size=st.integers(1, 6))
def test_c_stays_inside_its_buffer(small_parts: ctypes.CDLL, text: str, size: int) -> None:
    found = first_host(small_parts, text, size)
    assert found is None or 0 < len(found) < size


GROUPS = {
    "0::/system.slice/slurmstepd.scope/job_7/step_0/slurm": "system.slice/slurmstepd.scope/job_7/"
    "step_0/memory.events",
    "9:memory:/slurm/uid_0/job_7/step_0": "memory/slurm/uid_0/job_7/step_0/memory.oom_control",
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    ("text", "kills"),
    [("low 0\noom 3\noom_kill 2\noom_group_kill 0\n", 2), ("oom 3\n", 0), ("", 0)],
)
def test_the_kernels_kills_for_want_of_memory(
    small_parts: ctypes.CDLL, tmp_path: Path, group: str, text: str, kills: int
) -> None:
    membership = tmp_path / "cgroup"
    membership.write_text(f"12:pids:/\n{group}\n1:name=systemd:/\n")
    events = tmp_path / "fs" / GROUPS[group]
    events.parent.mkdir(parents=True)
    events.write_text(text)
    paths = (os.fsencode(membership), os.fsencode(tmp_path / "fs"))
    assert small_parts.memory_kills(*paths) == kills
    events.unlink()
    assert small_parts.memory_kills(*paths) == 0
    membership.write_text("0::/user.slice\n" + "x" * 10_000)
    assert small_parts.memory_kills(*paths) == 0
