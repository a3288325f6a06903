"""The file tree and the mounts that every process of a lab sees."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
from pathlib import Path

from slurm_resilience.lab import conf, programs, reachable
from slurm_resilience.lab.machines import linux
from slurm_resilience.lab.machines.rootfs import DATABASE_DIRECTORIES
from slurm_resilience.lab.spec import LabSpec

# Run by slurmd on the node when `scontrol reboot` asks for it. Thrice guarded against being run
# anywhere else: there must be a node's disk, pid 1 must be a lab's init, and the call itself
# refuses the machine's own namespace.
_REBOOT = """#!/bin/sh
[ -e /run/sres-node/instance-id ] && grep -q lab.machines.init /proc/1/cmdline || {{
    echo "reboot-node: not inside a lab node; nothing was done" >&2
    exit 1
}}
exec {program}
"""
# Run by slurmctld with a hostlist. Some seconds pass between a machine's end and the next one's
# boot: by its boot time Slurm tells the new one from the old one.
_SUSPEND = """#!/bin/sh
for node in $(scontrol show hostnames "$1"); do
    {program} power-off "$node"
done
"""
_RESUME = """#!/bin/sh
sleep 2
for node in $(scontrol show hostnames "$1"); do
    {program} replace "$node"
done
"""
# Run by sresd on the node: the keeper starts slurmd there.
_JOIN = """#!/bin/sh
exec {program} join "$(hostname)"
"""
_PROGRAM = """#!/bin/sh
exec {program} "$@"
"""


def make_tree(lab: Path, name: str, spec: LabSpec, plan: conf.ConfPlan) -> None:
    """Write every directory, key and configuration file of a new lab."""
    system = spec.root_directory() or Path("/")
    for part in (
        "etc",
        "log",
        "bin",
        "munge",
        "ctl/state",
        "ctl/sresctld",
        "ctl/run",
        "run",
        "home",
        "nodes",
    ):
        (lab / part).mkdir(parents=True, exist_ok=True)
    for file, text in conf.files(name, spec, plan, lab).items():
        (lab / "etc" / file).write_text(text)
        if file == "slurmdbd.conf":
            (lab / "etc" / file).chmod(0o600)
    for file, text in (
        ("passwd", conf.accounts((system / "etc" / "passwd").read_text(), lab)),
        ("group", conf.groups((system / "etc" / "group").read_text())),
    ):
        (lab / file).write_text(text)
    for person, uid in conf.PEOPLE.items():
        home = lab / "home" / person
        home.mkdir()
        os.chown(home, uid, uid)
    key = lab / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    _write_program(
        lab / "bin" / "reboot-node", _REBOOT, programs.quick("slurm_resilience.lab.machines.reboot")
    )
    ask_keeper = programs.quick("slurm_resilience.lab.replacer", str(lab / "keeper.sock"))
    for name, text in (
        ("replace-node", _PROGRAM),
        ("suspend-node", _SUSPEND),
        ("resume-node", _RESUME),
        ("join-node", _JOIN),
    ):
        _write_program(lab / "bin" / name, text, ask_keeper)
    if (plugin := spec.plugin_file()) is not None:
        # plugstack.conf knows no quotes, and a repository's path may have blanks.
        (lab / "bin" / "sres.so").symlink_to(plugin)
        (lab / "bin" / "sres-resume").symlink_to(programs.own_bin() / "sres-resume")


def _write_program(path: Path, template: str, argv: list[str]) -> None:
    path.write_text(template.format(program=shlex.join(argv)))
    path.chmod(0o755)


def mount_world(lab: Path) -> None:
    """Give the lab its own view of the machine. Called once, in the lab's own mount namespace.

    The lab's host table, people and munge socket are seen at their usual places; a Slurm that is
    configured on the machine is not seen at all. /run is the machine's with additions, since
    nothing may be created in the real one. The lab's people may pass the directories above this
    package and its virtual environment, even where those lie in a private home.
    """
    _own_run(lab)
    reachable.open_way(programs.own_directories())
    for source, target in (
        (lab / "etc" / "hosts", Path("/etc/hosts")),
        (lab / "passwd", Path("/etc/passwd")),
        (lab / "group", Path("/etc/group")),
        (lab / "etc", Path("/etc/slurm")),
        (lab / "etc", Path("/etc/slurm-llnl")),
    ):
        if target.exists():
            linux.bind(source, target)


def _own_run(lab: Path) -> None:
    staging = lab / "run"
    linux.mount("tmpfs", str(staging), "tmpfs", linux.MS_NOSUID, "mode=755")
    for entry in sorted(Path("/run").iterdir()):
        # One that cannot be shown (a socket in the middle of its removal) is left out.
        with contextlib.suppress(OSError):
            reachable.show(entry, staging / entry.name, recursive=entry not in lab.parents)
    ours = {"sres-node": None, "munge": lab / "munge"}
    ours |= dict.fromkeys(DATABASE_DIRECTORIES, lab / "mysql")
    for name, source in ours.items():
        target = staging / name
        target.mkdir(exist_ok=True)
        if source is not None and source.is_dir():
            linux.bind(source, target)
    linux.mount(str(staging), "/run", flags=linux.MS_MOVE)
