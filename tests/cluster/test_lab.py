"""The lab itself: what the other cluster tests stand on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurm_resilience.cli.lab import lab as sres_lab
from slurm_resilience.errors import LabError, MissingTool, NotFound, SresError, UsageError
from slurm_resilience.lab import Lab, LabSpec, state_file
from slurm_resilience.lab.releases import VERSIONS, own_version, root_of

BARE = LabSpec(nodes=3, daemons=False, lifecycle=None)
NETWORKED = LabSpec(nodes=3, daemons=False, lifecycle=None, network=True)
GPUS = LabSpec(nodes=2, daemons=False, lifecycle=None, gres="gpu:h100:2")


def processes_of(directory: Path) -> list[str]:
    """Every process of a lab: all of them carry its directory in their environment."""
    mark, found = f"SRES_LAB={directory}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(f"{entry.name} {(entry / 'comm').read_text().strip()}")
        except OSError:
            continue
    return found


def mounts_of(directory: Path) -> list[str]:
    """Mounts of a lab in any mount namespace on the machine."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            lines = entry.read_text().splitlines()
            # /run may be a file system of its own, and is then not named.
            found.update(line for line in lines if f"/{directory.name}/" in line)
        except OSError:
            continue
    return sorted(found)


def machine_network() -> str:
    """The machine's own links, addresses and routes."""
    words = (["link"], ["addr"], ["route"], ["-6", "route"])
    shown = [subprocess.check_output(["ip", "-o", *w], text=True) for w in words]
    return re.sub(r"(valid_lft|preferred_lft|expires) \S+", "", "".join(shown))


# What a lab is


@pytest.mark.parametrize("spec", [BARE, NETWORKED], ids=["plain", "networked"])
def test_every_node_is_idle_and_runs_jobs_of_root_and_of_plain_users(shared_lab, spec):
    lab = shared_lab(spec)
    assert lab.node_states() == {"n1": "IDLE", "n2": "IDLE", "n3": "IDLE"}
    names = lab.run(["srun", "-N3", "hostname"], check=True).stdout.split()
    assert sorted(names) == ["n1", "n2", "n3"]
    for user, uid in (("alice", "20001"), ("nobody", "65534"), (20002, "20002")):
        done = lab.run(["srun", "-N2", "id", "-u"], user=user, check=True)
        assert done.stdout.split() == [uid, uid]


def test_a_batch_job_starts_at_once_and_alice_has_a_home(shared_lab, wait_for):
    lab = shared_lab(BARE)
    script = "#!/bin/sh\necho $HOME > $HOME/seen\n"
    home = lab.directory / "home" / "alice"
    lab.run(["sbatch", "--exclusive"], user="alice", cwd=home, input=script, check=True)
    wait_for(lambda: (home / "seen").exists() and (home / "seen").read_text(), 5, "the job ran")
    assert (home / "seen").read_text().strip() == str(home)


def test_gpu_steps_see_their_devices(shared_lab):
    lab = shared_lab(GPUS)
    argv = ["srun", "-N2", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES"]
    assert lab.run(argv, check=True).stdout.split() == ["0,1", "0,1"]
    argv[2] = "--gres=gpu:h100:1"
    assert lab.run(argv, check=True).stdout.split() == ["0", "0"]


def test_accounting_answers_and_remembers_jobs(shared_lab, wait_for):
    lab = shared_lab(LabSpec(nodes=1, daemons=False, lifecycle=None, slurmdbd=True))
    clusters = lab.run(["sacctmgr", "-nP", "show", "cluster", "format=cluster"], check=True)
    assert clusters.stdout.split() == [lab.name]
    lab.run(["srun", "-J", "remembered", "true"], user="alice", check=True)
    argv = ["sacct", "-aXnP", "-o", "User,JobName,State"]
    wait_for(
        lambda: "alice|remembered|COMPLETED" in lab.run(argv).stdout, 15, "sacct shows the job"
    )


def test_the_callers_slurm_does_not_leak_in(shared_lab, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "nowhere")
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    lab = shared_lab(BARE)
    seen = lab.run(["env"], check=True).stdout
    assert "SLURM_JOB_ID" not in seen and "SBATCH_PARTITION" not in seen
    assert f"SLURM_CONF={lab.directory}/etc/slurm.conf" in seen
    if Path("/etc/slurm").is_dir():
        assert "slurm.conf" in lab.run(["ls", "/etc/slurm"], check=True).stdout


def test_two_labs_live_side_by_side(fresh_lab):
    first, second = fresh_lab(BARE), fresh_lab(NETWORKED)
    third = fresh_lab(BARE)
    first.power_off("n1")
    for lab in (second, third):
        assert set(lab.node_states().values()) == {"IDLE"}
        lab.run(["srun", "-N3", "true"], check=True)


def test_options_of_slurm_conf_replace_the_labs_own(fresh_lab):
    lab = fresh_lab(
        LabSpec(nodes=1, daemons=False, lifecycle=None, options={"slurmdtimeout": "17"})
    )
    shown = lab.run(["scontrol", "show", "config"], check=True).stdout
    assert re.search(r"SlurmdTimeout\s*= 17 sec", shown)


@pytest.mark.parametrize("version", [v for v in VERSIONS if v != own_version()])
def test_another_slurm_out_of_its_own_root(fresh_lab, tmp_path, version):
    try:
        root = root_of(version)
    except MissingTool as error:
        pytest.skip(str(error))
    lab = fresh_lab(LabSpec(nodes=2, network=True, slurm_root=root, gres="gpu:2"))
    own = subprocess.check_output(["chroot", root, "slurmctld", "-V"], text=True)
    assert lab.run(["scontrol", "-V"], check=True).stdout == own
    argv = ["srun", "-N2", "--gres=gpu:2", "printenv", "CUDA_VISIBLE_DEVICES"]
    assert lab.run(argv, user="alice", check=True).stdout.split() == ["0,1", "0,1"]
    assert lab.run(["ls", str(tmp_path.parent)], check=True).stdout
    lab.run(["touch", "/usr/written"], node="n1", check=True)
    assert not (Path(root) / "usr" / "written").exists()
    assert lab.status()["nodes"]["n2"]["daemons"]["sresd"] == "running"
    lab.run(["scontrol", "update", "node=n2", "state=down", "reason=test"], check=True)
    lab.replace("n2")
    lab.run(["scontrol", "update", "node=n2", "state=resume"], check=True)
    lab.wait_states({"n[1-2]": "IDLE"})
    lab.down()
    assert processes_of(lab.directory) == [] and mounts_of(lab.directory) == []


@pytest.mark.parametrize("version", [v for v in VERSIONS if v != own_version()])
def test_accounting_of_another_slurm(fresh_lab, version):
    try:
        root = root_of(version)
    except MissingTool as error:
        pytest.skip(str(error))
    lab = fresh_lab(LabSpec(nodes=1, slurm_root=root, slurmdbd=True))
    clusters = lab.run(["sacctmgr", "-nP", "show", "cluster", "format=cluster"], check=True)
    assert clusters.stdout.split() == [lab.name]


def test_a_daemon_that_dies_while_the_lab_comes_up_is_named(fresh_lab):
    broken = LabSpec(nodes=1, sres_options={"controller": {"no_such_key": 1}})
    with pytest.raises(LabError, match=r"sresctld did not start: .*no_such_key"):
        fresh_lab(broken)


def test_a_plain_users_python_is_the_environments_in_another_slurm(fresh_lab):
    version = next(v for v in reversed(VERSIONS) if v != own_version())
    try:
        root = root_of(version)
    except MissingTool as error:
        pytest.skip(str(error))
    lab = fresh_lab(LabSpec(nodes=1, slurm_root=root, daemons=False))
    show = "import ctypes, decimal, lzma, msgspec, sqlite3, ssl, sys; print(sys.prefix)"
    done = lab.run(["python", "-c", show], user="alice", node="n1", check=True)
    assert done.stdout.strip() == sys.prefix


# Commands inside


def test_a_command_looks_like_a_child_of_the_caller(shared_lab, wait_for):
    lab = shared_lab(BARE)
    assert lab.run(["sh", "-c", "exit 7"]).returncode == 7
    assert lab.run(["sh", "-c", "kill -SEGV $$"]).returncode == -signal.SIGSEGV
    assert lab.run(["cat"], input="through").stdout == "through"
    trap = "trap 'echo got it; exit 3' USR1; echo ready; while :; do sleep 0.05; done"
    process = lab.popen(["sh", "-c", trap], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=10)[0] == "got it\n"
    assert process.returncode == 3


def test_a_killed_command_is_gone_inside_too(shared_lab, wait_for):
    lab = shared_lab(BARE)
    process = lab.popen(["sleep", "98765"], node="n2", user="alice")

    def inside() -> bool:
        return "sleep 98765" in lab.run(["ps", "ax", "-o", "args"], node="n2").stdout

    wait_for(inside, 5, "the command runs")
    process.kill()
    process.wait(10)
    wait_for(lambda: not inside(), 5, "the command is gone")


def test_a_kernel_log_line_is_read_on_the_node_and_never_blocks(fresh_lab):
    lab = fresh_lab(BARE)
    lab.kmsg("n[1-2]", "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus")
    read = lab.run(["head", "-n1", "/run/sres-node/kmsg"], node="n2", check=True).stdout
    assert read == "NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus\n"
    with pytest.raises(LabError, match="n3's kernel log is full"):
        for _ in range(100):
            lab.kmsg("n3", "x" * 4000)
    # Kept over a power cycle, but what the last boot said is not said again.
    lab.reboot("n3")
    lab.kmsg("n3", "fresh")
    read = lab.run(["head", "-n1", "/run/sres-node/kmsg"], node="n3", check=True).stdout
    assert read == "fresh\n"


# Power


@pytest.mark.parametrize("spec", [BARE, NETWORKED], ids=["plain", "networked"])
def test_power_off_ends_everything_and_power_on_keeps_the_disk(fresh_lab, spec):
    lab = fresh_lab(spec)
    instance = lab.instance("n3")
    lab.run(["sh", "-c", "echo kept > /run/sres-node/mine; touch /dev/shm/lost"], node="n3")
    assert "lost" not in lab.run(["ls", "/dev/shm"], node="n2").stdout
    lab.power_off("n3")
    assert lab.status()["nodes"]["n3"]["state"] == "off"
    assert lab.run(["true"], node="n3").returncode == LabError.exit_code
    with pytest.raises(LabError, match="n3 is powered off already"):
        lab.power_off("n3")
    lab.run(["scontrol", "update", "node=n3", "state=down", "reason=test"], check=True)
    lab.power_on("n3")
    with pytest.raises(LabError, match="n3 is powered on already"):
        lab.power_on("n3")
    lab.run(["scontrol", "update", "node=n3", "state=resume"], check=True)
    lab.wait_states({"n[1-3]": "IDLE"})
    assert lab.run(["cat", "/run/sres-node/mine"], node="n3").stdout == "kept\n"
    assert "lost" not in lab.run(["ls", "/dev/shm"], node="n3").stdout
    assert lab.instance("n3") == instance
    lab.run(["srun", "-w", "n3", "true"], check=True)


def test_a_power_cycle_that_nobody_marked_is_seen_by_slurm(fresh_lab):
    lab = fresh_lab(BARE)
    lab.reboot("n2")
    lab.wait_states({"n2": "DOWN"})
    reason = lab.run(["scontrol", "show", "node", "n2"]).stdout
    assert "unexpectedly rebooted" in reason


def test_scontrol_reboot_reboots_the_node_and_only_it(fresh_lab, wait_for):
    lab = fresh_lab(BARE)
    argv = ["scontrol", "reboot", "ASAP", "nextstate=RESUME", "reason=test", "n1"]
    lab.run(argv, check=True)
    wait_for(lambda: lab.status()["nodes"]["n1"]["boots"] == 2, 15, "n1 booted again")
    lab.wait_states({"n[1-3]": "IDLE"})
    for place in ("ctl", "n1"):
        assert lab.run(["scontrol", "ping"], node=place).returncode == 0


def test_the_reboot_program_refuses_to_run_anywhere_else(shared_lab):
    lab = shared_lab(BARE)
    program = str(lab.directory / "bin" / "reboot-node")
    done = lab.run([program])
    assert done.returncode == 1 and "not inside a lab node; nothing was done" in done.stderr
    code = "from slurm_resilience.lab.machines.linux import reboot_this_node as r; r()"
    outside = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "not inside a lab node" in outside.stderr


def test_replace_runs_the_scripts_again_and_gives_a_new_machine(fresh_lab, tmp_path):
    script = tmp_path / "10-count.sh"
    script.write_text('#!/bin/sh\necho "$1" >> /run/sres-node/ran\n')
    script.chmod(0o755)
    lab = fresh_lab(LabSpec(nodes=2, daemons=False, lifecycle=tmp_path))
    before = lab.instance("n2")
    lab.reboot("n2")
    assert lab.run(["cat", "/run/sres-node/ran"], node="n2").stdout == "n2\nn2\n"
    program = str(lab.directory / "bin" / "replace-node")
    done = lab.run([program, "replace", "n2"])
    assert done.returncode == 0 and "joined as instance i-" in done.stdout
    assert lab.run(["cat", "/run/sres-node/ran"], node="n2").stdout == "n2\n"
    assert lab.instance("n2") != before
    lab.run(["scontrol", "update", "node=n2", "state=resume"])
    lab.wait_states({"n[1-2]": "IDLE"})


def test_a_replacement_asked_for_twice_at_once_is_done_once(fresh_lab):
    lab = fresh_lab(BARE)
    program = str(lab.directory / "bin" / "replace-node")
    both = [lab.popen([program, "replace", "n1"], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.wait(30) for process in both] == [0, 0]
    assert lab.status()["nodes"]["n1"]["boots"] == 2


def test_a_node_whose_scripts_fail_never_joins(fresh_lab, tmp_path):
    script = tmp_path / "50-fit.sh"
    script.write_text('#!/bin/sh\necho "disk of $1 is broken"\n[ "$1" != n2 ]\n')
    script.chmod(0o755)
    lab = fresh_lab(LabSpec(nodes=2, daemons=False, lifecycle=tmp_path))
    seen = lab.status()["nodes"]["n2"]
    assert seen["state"] == "failed" and "50-fit.sh failed (exit code 1)" in seen["why"]
    assert "slurmd" not in seen["daemons"]
    assert (
        "disk of n2 is broken"
        in (lab.directory / "nodes/n2/disk/lifecycle/log/50-fit.sh.log").read_text()
    )
    assert "50-fit.sh" in (lab.directory / "nodes/n2/log/node.log").read_text()
    assert lab.node_states()["n1"] == "IDLE" and lab.node_states()["n2"] != "IDLE"
    done = lab.run([str(lab.directory / "bin" / "replace-node"), "replace", "n2"])
    assert done.returncode == LabError.exit_code and "did not join" in done.stdout
    script.write_text("#!/bin/sh\n")
    lab.replace("n2")
    lab.wait_states({"n[1-2]": "IDLE"})


# Network

LISTEN = "import socket; s = socket.create_server(('', 5000)); c, _ = s.accept(); c.recv(1)"
# Says what it hears within a time: nothing at all, an end (FIN), or a reset.
HEAR = textwrap.dedent("""
    import socket, sys
    channel = socket.create_connection(("n2", 5000), 5)
    print("connected", flush=True)
    sys.stdin.readline()
    channel.settimeout(1.5)
    try:
        print("FIN" if channel.recv(1) == b"" else "data")
    except TimeoutError:
        print("silence")
    except ConnectionError:
        print("RST")
""")


def hear(lab: Lab, wait_for, end) -> str:
    """Connect from ctl to n2, let ``end`` happen to n2, and tell what ctl hears of it."""
    listener = lab.popen([sys.executable, "-c", LISTEN], node="n2")
    argv = ["ss", "-Hltn", "sport = :5000"] if Path("/usr/bin/ss").exists() else ["true"]
    wait_for(lambda: lab.run(argv, node="n2").stdout, 10, "n2 listens")
    pipe = subprocess.PIPE
    client = lab.popen([sys.executable, "-c", HEAR], stdin=pipe, stdout=pipe)
    assert client.stdout is not None and client.stdout.readline() == "connected\n"
    end(listener)
    heard, _ = client.communicate("go\n", timeout=20)
    listener.kill()
    return heard.strip()


def test_power_loss_is_silent_and_a_dying_process_is_not(fresh_lab, wait_for):
    lab = fresh_lab(NETWORKED)
    assert hear(lab, wait_for, lambda listener: listener.kill()) in ("FIN", "RST")
    assert hear(lab, wait_for, lambda _: lab.cut("n2")) == "silence"
    lab.mend("n2")
    assert hear(lab, wait_for, lambda _: lab.power_off("n2")) == "silence"


def test_cut_and_mend(fresh_lab):
    lab = fresh_lab(NETWORKED)
    connect = "import sys, socket; socket.create_connection(('n1', 6818), int(sys.argv[1]))"
    argv = [sys.executable, "-c", connect]
    assert lab.run([*argv, "20"]).returncode == 0
    lab.cut("n1")
    assert lab.status()["nodes"]["n1"]["cable"] == "cut"
    assert "timed out" in lab.run([*argv, "1"]).stderr
    with pytest.raises(LabError, match="n1's cable is cut already"):
        lab.cut("n1")
    lab.mend("n1")
    assert lab.run([*argv, "20"]).returncode == 0
    lab.run(["srun", "-N3", "true"], check=True)


def test_a_replaced_node_has_a_new_cable(fresh_lab):
    lab = fresh_lab(NETWORKED)
    lab.cut("n1")
    lab.reboot("n1")
    assert lab.status()["nodes"]["n1"]["cable"] == "cut"
    lab.replace("n1")
    assert lab.status()["nodes"]["n1"]["cable"] == "in place"


def test_a_plain_lab_has_no_cables(shared_lab):
    with pytest.raises(LabError, match="n1 has no cable of its own"):
        shared_lab(BARE).cut("n1")


def test_the_machines_own_network_is_left_alone(fresh_lab):
    before = machine_network()
    lab = fresh_lab(NETWORKED)
    lab.power_off("n1")
    lab.power_on("n1")
    assert machine_network() == before
    lab.down()
    assert machine_network() == before


# Daemons


def test_our_daemons_run_and_stay_dead_when_killed(fresh_lab):
    lab = fresh_lab(LabSpec(nodes=2, network=True))
    assert lab.status()["ctl"]["sresctld"] == "running"
    assert lab.status()["nodes"]["n2"]["daemons"]["sresd"] == "running"
    lab.kill_daemon("sresctld", signal.SIGKILL)
    lab.kill_daemon("sresd", signal.SIGKILL, node="n2")
    assert lab.status()["ctl"]["sresctld"] == "killed by signal 9"
    assert lab.status()["nodes"]["n2"]["daemons"]["sresd"] == "killed by signal 9"
    with pytest.raises(LabError, match="sresd does not run on n2"):
        lab.kill_daemon("sresd", node="n2")
    lab.start_daemon("sresctld")
    lab.start_daemon("sresd", node="n2")
    assert lab.status()["ctl"]["sresctld"] == "running"
    with pytest.raises(LabError, match="sresctld is running on ctl already"):
        lab.start_daemon("sresctld")


# Birth and end


def test_down_leaves_nothing(fresh_lab):
    lab = fresh_lab(LabSpec(nodes=2, network=True, slurmdbd=True))
    process = lab.popen(["sleep", "1000"], node="n1")
    assert processes_of(lab.directory) and mounts_of(lab.directory)
    lab.down()
    process.wait(10)
    assert processes_of(lab.directory) == []
    assert mounts_of(lab.directory) == []
    assert not lab.directory.exists()
    with pytest.raises(LabError, match="no lab in"):
        lab.down()


@pytest.mark.parametrize("moment", ["starting slurmctld", "starting 3 nodes", "waiting"])
def test_an_up_that_is_killed_leaves_nothing(fresh_lab, wait_for, moment):
    name = f"killed-{os.getpid()}"
    directory = state_file.BASE / name
    code = textwrap.dedent(f"""
        import os, signal
        from slurm_resilience.lab import Lab, LabSpec
        def progress(text):
            if text.startswith({moment!r}):
                os.kill(os.getpid(), signal.SIGKILL)
        Lab.up(LabSpec(nodes=3, network=True, daemons=False), {name!r}, on_progress=progress)
    """)
    fresh_lab(BARE)  # Skips here when no lab can be built at all.
    done = subprocess.run([sys.executable, "-c", code])
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: not processes_of(directory), 10, "no process is left")
    assert mounts_of(directory) == []
    wait_for(lambda: not directory.exists(), 10, "its directory is gone")


def test_a_killed_keeper_takes_everything_along_and_the_next_up_cleans(fresh_lab, wait_for):
    lab = fresh_lab(BARE)
    os.kill(json.loads((lab.directory / state_file.KEEPER_FILE).read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: not processes_of(lab.directory), 10, "no process is left")
    assert mounts_of(lab.directory) == []
    with pytest.raises(LabError, match="has died"):
        Lab.open(lab.name)
    with Lab.up(BARE, name=lab.name) as again:
        assert set(again.node_states().values()) == {"IDLE"}


def test_a_tied_lab_ends_with_its_caller(fresh_lab, wait_for):
    fresh_lab(BARE)  # Skips here when no lab can be built at all.
    directory = state_file.BASE / f"tied-{os.getpid()}"
    code = textwrap.dedent(f"""
        import os, signal
        from slurm_resilience.lab import Lab, LabSpec
        lab = Lab.up(LabSpec(nodes=1, daemons=False), {directory.name!r}, tied=True)
        lab.run(["srun", "true"], check=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    wait_for(lambda: not processes_of(directory), 10, "no process is left")
    wait_for(lambda: not directory.exists(), 10, "its directory is gone")


def test_a_lab_that_is_up_is_not_built_twice(shared_lab):
    lab = shared_lab(BARE)
    with pytest.raises(LabError, match="is up already"):
        Lab.up(BARE, name=lab.name)
    assert Lab.open(lab.name).node_states() == Lab.open(lab.directory).node_states()


def test_a_slurmctld_that_cannot_start_says_why_and_leaves_nothing(fresh_lab):
    fresh_lab(BARE)
    name = f"broken-{os.getpid()}"
    with pytest.raises(LabError, match=r"slurmctld does not answer.*select/nonsense"):
        Lab.up(LabSpec(nodes=1, daemons=False, options={"SelectType": "select/nonsense"}), name)
    assert processes_of(state_file.BASE / name) == [] and not (state_file.BASE / name).exists()


# The command line


@pytest.mark.parametrize(
    ("words", "kind", "line"),
    [
        (["up", "--nodes", "0"], UsageError, "a lab has 1 to 512 nodes, not 0"),
        (["up", "--nodes", "2", "--gres", "gpu"], UsageError, "'gpu' is not a GRES"),
        (["up", "--nodes", "2", "--name", "a;b"], UsageError, "'a;b' is not a lab name"),
        (["up", "--nodes", "2", "--option", "x"], UsageError, "write KEY=VALUE"),
        (["up", "--nodes", "2", "--option", "x y=1"], UsageError, "not a slurm.conf line"),
        (["up", "--nodes", "2", "--plugin", "/nowhere.so"], UsageError, "no such plugin"),
        (["up", "--nodes", "2", "--lifecycle", "/nowhere"], UsageError, "no such directory"),
        (["up", "--nodes", "2", "--slurm-root", "/nowhere"], UsageError, "not a root directory"),
        (["up", "--nodes", "2", "--dir", "/etc"], LabError, "/etc is not empty"),
        (["up", "--nodes", "2", "--dir", f"/run/{'x' * 90}"], UsageError, "at most 80"),
        (["down", "--name", "nosuch"], LabError, "no lab in /run/sres-lab/nosuch"),
        (["status", "--name", "nosuch"], LabError, "no lab in"),
        (["power-off", "n9", "--name", "@"], NotFound, "no node 'n9' in lab"),
        (["power-off", "n[1", "--name", "@"], UsageError, "is not a hostlist"),
        (["power-on", "n1", "--name", "@"], LabError, "n1 is powered on already"),
        (["mend", "n1", "--name", "@"], LabError, "n1 has no cable of its own"),
        (["daemon", "start", "--name", "@", "sresd"], UsageError, "name them"),
        (["daemon", "kill", "--name", "@", "httpd"], UsageError, "is no daemon of a lab"),
        (["daemon", "kill", "--name", "@", "slurmctld", "--signal", "X"], UsageError, "a signal"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_changes_nothing(shared_lab, words, kind, line):
    lab = shared_lab(BARE)
    before = lab.status()
    result = CliRunner().invoke(sres_lab, [lab.name if word == "@" else word for word in words])
    assert result.exit_code != 0
    assert isinstance(result.exception, SresError) and type(result.exception) is kind
    assert line in str(result.exception) and "\n" not in str(result.exception)
    assert lab.status() == before


def test_the_command_line_shows_what_is_there(shared_lab):
    lab = shared_lab(BARE)
    shown = CliRunner().invoke(sres_lab, ["status", "--name", lab.name])
    assert shown.exit_code == 0 and "slurmctld" in shown.output and "IDLE" in shown.output
    assert lab.name in CliRunner().invoke(sres_lab, ["list"]).output


def test_without_root_it_says_so():
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    code = "import os; os.seteuid(65534)\n" + textwrap.dedent("""
        from slurm_resilience.errors import LabError
        from slurm_resilience.lab import bring_up, LabSpec
        try:
            bring_up.create(LabSpec(nodes=1, lifecycle=None), "x", None, print, False)
        except LabError as error:
            print(error)
    """)
    # Loaded first: another user may not be able to read this checkout.
    code = "import slurm_resilience.lab.bring_up, slurm_resilience.lab.spec\n" + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert "a lab needs root" in done.stdout, done.stderr
