"""`sres` on a real cluster: what it shows and does; what it refuses changes nothing."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurm_resilience.lab import Lab, LabSpec

REPOSITORY = Path(__file__).resolve().parents[2]
Done = subprocess.CompletedProcess[str]
JSON_KEYS = {
    "status": {
        "cluster", "slurm", "slurm_away", "controller", "states", "health", "sresd", "incidents",
        "jobs", "near_misses", "alarms", "gave_up", "failed", "modes", "queue",
    },
    "node": {
        "node", "state", "reason", "reason_by", "reason_at", "reason_unclear",
        "jobs", "partitions", "gres", "comment", "labels", "health", "why", "sresd", "findings",
        "unjudged", "incident", "gave_up", "boot_id", "instance", "mode", "next",
    },
}  # fmt: skip


class Sres:
    """Runs `sres` inside the lab."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def __call__(self, *words: str, env: dict[str, str] | None = None) -> Done:
        argv = [sys.executable, "-m", "slurm_resilience.cli.main", *words]
        return self.lab.run(argv, env=env, cwd="/")

    def ok(self, *words: str) -> str:
        done = self(*words)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        return done.stdout

    def json(self, *words: str) -> Any:
        return json.loads(self.ok(*words, "--format", "json"))

    def alice(self, *words: str) -> Done:
        """As a user without rights, who may not enter a root-only Python."""
        argv = [*user_python(self.lab), "-m", "slurm_resilience.cli.main", *words]
        return self.lab.run(argv, user="alice", cwd="/")

    def world(self) -> dict[str, Any]:
        """Return all that a refused command must not change."""
        fields = self.lab.run(["scontrol", "show", "node", "-o"], check=True).stdout
        kept = ("NodeName=", "State=", "Reason=")
        words = [w for w in fields.split() if w.startswith(kept) or w.startswith("[")]
        jobs = self.lab.run(["squeue", "-h", "-o", "%A %T %N"], check=True).stdout
        return {"nodes": words, "jobs": jobs, "paused": self.paused()}

    def paused(self) -> str:
        done = self("status", "--format", "json")
        return str(json.loads(done.stdout)["controller"].get("paused", ""))


def user_python(lab: Lab) -> list[str]:
    """A Python that alice may run: the tests' own, or the system's with our packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = [p for p in sys.path if p.endswith("site-packages")]
    path = "PYTHONPATH=" + ":".join([str(REPOSITORY), *packages])
    for python in (sys.executable, f"/usr/bin/{version}"):
        words = ["env", path, python]
        probe = [*words, "-c", "import slurm_resilience.slurm.cli"]
        if lab.run(probe, user="alice", cwd="/").returncode == 0:
            return words
    pytest.skip(f"no {version} that another user may run")


@pytest.fixture(scope="module")
def module_lab(shared_lab: Callable[[LabSpec], Lab]) -> Lab:
    # Its own spec: these tests mark nodes.
    return shared_lab(LabSpec(nodes=4, cpus=3, options={"PrivateData": "jobs"}))


@pytest.fixture
def sres(module_lab: Lab, wait_for: Callable[..., Any]) -> Iterator[Sres]:
    """All nodes idle and spoken for; afterwards the same again."""
    cli = Sres(module_lab)

    def quiet() -> bool:
        picture = json.loads(cli("status", "--format", "json").stdout)
        return (
            picture["health"] == {"healthy": ["n1", "n2", "n3", "n4"]}
            and picture["states"] == {"IDLE": ["n1", "n2", "n3", "n4"]}
            and not picture["incidents"]
        )

    wait_for(quiet, 40, "four healthy, idle nodes")
    yield cli
    for user in ("root", "alice"):
        module_lab.run(["scancel", f"--user={user}"])
    cli("unpause")
    for node, fields in module_lab.node_fields().items():
        if fields["State"] != "IDLE" and "Action" not in fields.get("Reason", ""):
            module_lab.run(["scontrol", "update", f"nodename={node}", "state=resume"])


def batch(lab: Lab, *options: str, script: str = "sleep 300\n", user: str | None = None) -> int:
    """Submit; the job's id."""
    home = lab.directory / "home" / user if user else "/tmp"
    done = lab.run(
        ["sbatch", "--parsable", "--output=/dev/null", *options],
        input=f"#!/bin/bash\n{script}",
        user=user,
        cwd=home,
        check=True,
    )
    return int(done.stdout)


def runs(lab: Lab, job: int, wait_for: Callable[..., Any]) -> None:
    argv = ["squeue", "-h", "-j", str(job), "-o", "%T"]
    wait_for(lambda: lab.run(argv).stdout.strip() == "RUNNING", 30, f"job {job} runs")


def one_line(done: Done, code: int) -> str:
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stderr.startswith("sres: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# -- reading ----------------------------------------------------------------------------------


def test_the_picture(sres: Sres) -> None:
    text = sres.ok("status")
    for words in ("last cycle", "4 IDLE (n[1-4])", "4 healthy (n[1-4])", "4 connected", "nothing"):
        assert words in text
    picture = sres.json("status")
    assert set(picture) == JSON_KEYS["status"]
    assert picture["controller"]["cycle_age"] < 10


def test_the_list_fits_a_terminal(sres: Sres) -> None:
    assert set(sres.json("node", "list")[0]) == JSON_KEYS["node"]
    lines = sres("node", "list", "n[1,3]", env={"COLUMNS": "80"}).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["NODE", "n1", "n3"]
    assert max(map(len, lines)) <= 80
    assert sres.ok("node", "list", "--faulty") == "no faulty node\n"


def test_a_sheet_has_everything(sres: Sres) -> None:
    (view,) = sres.json("node", "show", "n2")
    assert set(view) == JSON_KEYS["node"] | {"events"}
    assert view["instance"] == sres.lab.instance("n2")
    assert "sresd      connected; machine" in sres.ok("node", "show", "n[2-3]")


def test_small_commands(sres: Sres) -> None:
    assert sres.ok("version") == sres.ok("--version")
    assert sres.ok("check", "config").endswith("sres.toml: ok\n")
    assert sres.json("job", "list") == []
    assert sres.ok("job", "list") == "no supervised job\n"


def test_a_site_is_checked_from_end_to_end(sres: Sres, tmp_path: Path) -> None:
    results = {row["check"]: row for row in sres.json("check", "site")["checks"]}
    wrong = {name: row["text"] for name, row in results.items() if row["result"] == "wrong"}
    assert wrong == {}
    assert {results[name]["result"] for name in ("slurm", "plugin", "port", "sresd")} == {"ok"}
    assert "n[1-4]" in results["sresd"]["text"]
    # The same site, with a port where nothing listens.
    other = tmp_path / "sres.toml"
    other.write_text("[controller]\nport = 1\n")
    done = sres("check", "site", env={"SRES_CONFIG": str(other)})
    assert "sres: error: port: " in one_line(done, 8)
    assert "sresctld does not run there" in done.stderr


def test_a_closed_pipe_is_quiet(sres: Sres) -> None:
    line = f"{shlex.quote(sys.executable)} -m slurm_resilience.cli.main node list | true"
    done = sres.lab.run(["bash", "-c", f"set -o pipefail; {line}; exit 0"], cwd="/")
    assert done.stderr == ""


# -- refusing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("node replace n[3-6]", 5, "no node n[5-6]"),
        ("node replace ALL", 5, "no node ALL"),
        ("node replace n[1", 2, "not a hostlist"),
        ("node replace n1,,@x", 2, "not a hostlist"),
        ("node replace --force n1", 2, "--yes"),
        ("node reboot --force n[1-4]", 2, "--yes"),
        ("node cancel n1", 2, "nothing to cancel on n1"),
        ("node show n9", 5, "no node n9"),
        ("node history n9", 5, "no node n9"),
        ("node watch n9", 5, "no node n9"),
        ("node watch n1 --timeout soon", 2, "--timeout"),
        ("job show 4000000", 5, "does not exist"),
        ("job show 1;2", 2, "not a job id"),
        ("--config /nowhere/sres.toml status", 3, "/nowhere/sres.toml"),
        ("check config /nowhere/sres.toml", 3, "no such file"),
        ("lab status --name nobodys", 9, "nobodys"),
        ("run -- hostname", 2, "not srun"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(
    sres: Sres, words: str, code: int, said: str
) -> None:
    before = sres.world()
    assert said in one_line(sres(*words.split()), code)
    assert sres.world() == before


def test_a_user_may_look_and_not_touch(sres: Sres, wait_for: Callable[..., Any]) -> None:
    job = batch(sres.lab, "-N1", "--wrap=sleep 300", script="")
    runs(sres.lab, job, wait_for)
    before = sres.world()
    assert sres.alice("status").returncode == 0
    assert sres.alice("node", "show", "n1").returncode == 0
    for words in ("node replace n1", "node replace --force --yes n1", "node reboot n2"):
        assert "does not let alice change nodes" in one_line(sres.alice(*words.split()), 6)
    for words in ("pause", "unpause"):
        assert "only root" in one_line(sres.alice(words), 6)
    assert "does not exist" in one_line(sres.alice("job", "show", str(job)), 5)
    assert sres.world() == before


def test_anothers_word_is_not_overridden(sres: Sres) -> None:
    sres.ok("pause", "by a test")
    sres.lab.run(
        ["scontrol", "update", "nodename=n4", "state=drain", "reason=fan broken"], check=True
    )
    before = sres.world()
    for words in ("node replace n[1-4]", "node reboot n4", "node replace --force n4"):
        line = one_line(sres(*words.split()), 2)
        assert "n4 is IDLE+DRAIN with the reason 'fan broken' (by root)" in line
    assert "nothing to cancel" in one_line(sres("node", "cancel", "n4"), 2)
    assert sres.world() == before


# -- doing ------------------------------------------------------------------------------------


def test_an_idle_node_is_replaced_and_watched(sres: Sres) -> None:
    machine = sres.lab.instance("n3")
    said = sres.ok("node", "replace", "n3").splitlines()
    assert said[0] == "n3: fail, Action:Replace; no job runs on it"
    assert said[1].endswith("sres node watch n3")
    watched = sres("node", "watch", "n3", "--timeout", "60")
    assert watched.returncode == 0, watched.stderr
    kinds = [line.split()[2] for line in watched.stdout.splitlines()]
    assert kinds[0] == "requested"
    assert kinds[-1] == "closed"
    assert "replaced and back in service" in watched.stdout
    assert sres.lab.instance("n3") != machine
    events = sres.json("node", "history", "n3")
    assert [event["id"] for event in events] == sorted(event["id"] for event in events)
    # Its labels are taken off afterwards.
    assert [event["kind"] for event in events if event["kind"] != "labelled"][-1] == "closed"
    assert "closed" in sres.ok("node", "history", "n[1-4]", "--limit", "5")


def test_jobs_end_before_their_node_is_replaced(sres: Sres, wait_for: Callable[..., Any]) -> None:
    job = batch(sres.lab, "-w", "n2")
    runs(sres.lab, job, wait_for)
    assert f"1 job runs on it and ends first (job {job})" in sres.ok("node", "replace", "n2")
    assert "left as it is" in sres.ok("node", "replace", "n2")
    wait_for(lambda: sres.json("status")["incidents"], 15, "the request is known")
    (view,) = sres.json("node", "list", "--faulty")
    assert (view["node"], view["jobs"], view["reason"]) == ("n2", [job], "Action:Replace")
    assert view["incident"]["state"] == "set-aside"
    line = sres.ok("node", "cancel", "n2")
    assert line == "n2: resume, Action:Replace taken back\n"
    runs(sres.lab, job, wait_for)
    assert sres.lab.node_fields()["n2"]["State"] in ("ALLOCATED", "MIXED")


def test_force_names_the_jobs_and_kills_them_with_yes(
    sres: Sres, wait_for: Callable[..., Any]
) -> None:
    job = batch(sres.lab, "-w", "n1", "--no-requeue")
    runs(sres.lab, job, wait_for)
    before = sres.world()
    line = one_line(sres("node", "replace", "--force", "n1"), 2)
    assert f"jobs on n1 die at once: {job} (is lost); add --yes" in line
    assert sres.world() == before
    assert "down, Action:Replace" in sres.ok("node", "replace", "--force", "--yes", "n1")
    argv = ["squeue", "-h", "-j", str(job), "-o", "%T"]
    wait_for(lambda: not sres.lab.run(argv).stdout.strip(), 30, "the job has ended")
    assert sres("node", "watch", "n1", "--timeout", "60").returncode == 0


def test_a_typo_is_shown_with_its_correction(sres: Sres, wait_for: Callable[..., Any]) -> None:
    sres.ok("pause", "by a test")
    update = ["scontrol", "update", "nodename=n4", "state=drain", "reason=action:replace"]
    sres.lab.run(update, check=True)
    told = " ".join(sres.ok("status").split())  # it is broken over lines where there is little room
    assert "not Action:Replace, so nothing is done; correct it: sres node replace n4" in told
    said = sres.ok("node", "replace", "n4")
    assert "n4: fail, Action:Replace" in said
    assert "paused (by a test): nothing follows" in said
    assert "resume" in sres.ok("node", "cancel", "n4")
    assert sres.lab.node_states()["n4"] == "IDLE"


def test_what_was_given_up_is_shown_and_asked_anew(
    fresh_lab: Callable[[LabSpec], Lab], wait_for: Callable[..., Any]
) -> None:
    program = {"program": ["/bin/sh", "-c", "echo no spare machine; exit 3"], "attempts": 1}
    sres = Sres(fresh_lab(LabSpec(nodes=1, sres_options={"replace": program})))
    wait_for(lambda: sres("status").returncode == 0, 15, "sresctld answers")
    for number in (1, 2):
        assert "fail, Action:Replace" in sres.ok("node", "replace", "n1")
        watch = sres("node", "watch", "n1", "--timeout", "60")
        assert "sresctld gave up" in one_line(watch, 1)
        assert "no spare machine" in watch.stdout
        wait_for(lambda: sres.json("status")["gave_up"], 10, "the status shows it")
        (given_up,) = sres.json("status")["gave_up"]
        assert (given_up["id"], given_up["node"]) == (number, "n1")
        assert "try again: sres node replace n1" in sres.ok("status")
        assert "gave up" in sres.ok("node", "show", "n1")


def test_pause_and_unpause(sres: Sres) -> None:
    assert "paused: network maintenance;" in sres.ok("pause", "network", "maintenance")
    assert "network maintenance: nothing is done" in sres.ok("status")
    assert sres.ok("unpause") == "sresctld goes on (was paused: network maintenance)\n"
    assert sres.ok("unpause") == "sresctld was not paused\n"
    # A reason of blanks must not mean the opposite.
    assert "paused: by root" in sres.ok("pause", "  ")
    assert sres.paused() == "by root"


def test_a_supervised_job_is_its_owners(sres: Sres, wait_for: Callable[..., Any]) -> None:
    words = " ".join([*user_python(sres.lab), "-m", "slurm_resilience.cli.main"])
    script = f"cd /\n{words} run -- srun -n1 sleep 300\n"
    job = batch(sres.lab, "-N1", "--exclusive", script=script, user="alice")
    wait_for(lambda: sres.json("job", "list"), 30, "the supervisor has spoken")
    (view,) = sres.json("job", "list")
    assert (view["job"], view["user"], view["state"], view["attempt"]) == (
        job, "alice", "RUNNING", 1,
    )  # fmt: skip
    own = sres.alice("job", "show", str(job))
    assert own.returncode == 0
    assert "attempt-started" in own.stdout
    other = batch(sres.lab, "-N1", "--exclusive", script=script.replace("300", "301"))
    wait_for(lambda: len(sres.json("job", "list")) == 2, 30, "root's job is supervised too")
    mine = sres.alice("job", "list", "--format", "json")
    assert [entry["job"] for entry in json.loads(mine.stdout)] == [job]
    assert "does not exist" in one_line(sres.alice("job", "show", str(other)), 5)
    assert str(other) in sres.ok("status")
    # PrivateData=jobs holds for what sresctld tells, too.
    told = json.loads(sres.alice("events", "--format", "json").stdout)
    assert {event["job"] for event in told} & {job, other} == {job}
    (seen,) = json.loads(sres.alice("status", "--format", "json").stdout)["jobs"]
    assert seen["job"] == job
    assert {event["job"] for event in sres.json("events")} >= {job, other}


def test_run_passes_arguments_and_exit_code(sres: Sres, tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = f"printf '%s|' \"$@\" > {out}; exit 42"
    argv = ["salloc", "-Q", "-N1", "--exclusive", sys.executable, "-m", "slurm_resilience.cli.main"]
    argv += ["run", "--", "srun", "-n1", "sh", "-c", program, "sh", "--", "-n", "a b", "--help"]
    done = sres.lab.run(argv, cwd="/", env={"PYTHONPATH": str(REPOSITORY)})
    assert done.returncode == 42, done.stderr
    assert out.read_text() == "--|-n|a b|--help|"


# -- what is not there ------------------------------------------------------------------------


def test_without_sresctld_slurm_still_speaks(sres: Sres, wait_for: Callable[..., Any]) -> None:
    sres.lab.kill_daemon("sresctld")
    try:
        before = sres.world()
        for words in ("status", "node list", "node show n1"):
            done = sres(*words.split())
            assert "sresctld does not answer at" in one_line(done, 8)
            assert "IDLE" in done.stdout
        for words in (
            "node history n1",
            "node watch n1",
            "job list",
            "job show 1",
            "pause",
            "unpause",
        ):
            done = sres(*words.split())
            assert "sresctld does not answer at" in one_line(done, 8)
            assert done.stdout == ""
        assert sres.world() == before
        said = sres.ok("node", "replace", "n4")
        assert "sresctld does not answer: nothing follows until it runs" in said
        assert "is not known; add --yes" in one_line(sres("node", "cancel", "n4"), 2)
        assert "taken back" in sres.ok("node", "cancel", "n4", "--yes")
    finally:
        sres.lab.start_daemon("sresctld")
    wait_for(lambda: sres("status").returncode == 0, 15, "sresctld answers again")


def test_a_watch_outlives_a_restart_of_sresctld(sres: Sres, wait_for: Callable[..., Any]) -> None:
    argv = [sys.executable, "-m", "slurm_resilience.cli.main", "node", "watch", "n2"]
    watch = sres.lab.popen(
        [*argv, "--timeout", "60"], cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert watch.stderr is not None
    assert "nothing is under way" in watch.stderr.readline()
    sres.lab.kill_daemon("sresctld")
    assert "waiting for it" in watch.stderr.readline()
    sres.lab.start_daemon("sresctld")
    wait_for(lambda: sres("status").returncode == 0, 15, "sresctld answers again")
    sres.ok("node", "reboot", "n2")
    out, _ = watch.communicate(timeout=60)
    assert watch.returncode == 0
    assert "rebooted and back in service" in out


def test_without_slurmctld_nothing_is_done(sres: Sres) -> None:
    sres.lab.kill_daemon("slurmctld")
    try:
        for words in ("status", "node replace n1"):
            assert "Unable to contact" in one_line(sres(*words.split()), 4)
    finally:
        sres.lab.start_daemon("slurmctld")
    sres.lab.wait_states({"n[1-4]": "IDLE"}, 30)


def test_without_munge_the_reason_is_said(sres: Sres, tmp_path: Path) -> None:
    text = (sres.lab.directory / "etc" / "sres.toml").read_text()
    lines = [
        'munge_socket = "/nowhere/munge"' if line.startswith("munge_socket") else line
        for line in text.splitlines()
    ]
    config = tmp_path / "sres.toml"
    config.write_text("\n".join(lines))
    before = sres.world()
    done = sres("--config", str(config), "status")
    assert "is munged running here, with the cluster's key?" in one_line(done, 7)
    assert "4 IDLE" in done.stdout
    assert "munged" in one_line(sres("pause", "x", "--config", str(config)), 7)
    assert sres.world() == before


def test_a_nodes_log_and_checks_are_asked_for_through_sresctld(sres: Sres) -> None:
    said = sres.ok("node", "logs", "n1")
    assert "connected to sresctld" in said and "kernel log: nothing found" in said
    tail = sres.json("node", "logs", "n1", "--lines", "1")
    assert len(tail["lines"]) == 1
    result = sres.json("node", "check", "n2", "inodes")
    assert (result["check"], result["verdict"]) == ("inodes", "pass")
    both = sres.json("check", "run", "n[1-2]", "--only", "inodes,memory")
    assert [one["node"] for one in both] == ["n1", "n2"]
    assert [one["check"] for one in both[1]["checks"]] == ["inodes", "memory"]
    assert "no check 'none'; it has" in one_line(sres("node", "check", "n2", "none"), 1)
    assert "names 2 nodes" in one_line(sres("node", "logs", "n[1-2]"), 2)
    for words in (("logs", "n1"), ("check", "n1", "inodes")):
        refused = one_line(sres.alice("node", *words), 6)
        assert "only root and SlurmUser may ask nodes" in refused
    sres.lab.kill_daemon("sresd", node="n3")
    assert "the sresd of n3 is not connected" in one_line(sres("node", "logs", "n3"), 8)
    sres.lab.start_daemon("sresd", node="n3")
