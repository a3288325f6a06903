"""The lab's configuration files, as text. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from slurm_resilience.lab.spec import LabSpec

PEOPLE = {"alice": 20001, "bob": 20002}
"""Two plain users whom every lab knows, with a home each."""


CGROUPS_CAN_BE_DISABLED = (24, 5)


def version(text: str) -> tuple[int, int] | None:
    """(major, minor) of what ``slurmctld -V`` says: ``slurm-wlm 24.11.5`` → (24, 11)."""
    match = re.search(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class ConfPlan:
    """The addresses and ports of the lab. ``nodes`` maps a node to its address and slurmd's
    port."""

    controller: str
    slurmctld_port: int
    slurmdbd_port: int
    sresctld_port: int
    nodes: dict[str, tuple[str, int]]
    backup: str = ""
    """The address of the second controller; empty: there is none."""


def files(name: str, spec: LabSpec, plan: ConfPlan, lab: PurePath) -> dict[str, str]:
    """Every file below ``etc/`` by name."""
    texts = {
        "slurm.conf": slurm_conf(name, spec, plan, lab),
        "plugstack.conf": _plugstack(spec, lab),
        "hosts": _hosts(plan),
        "sres.toml": _sres(spec, plan, lab),
    }
    if (gres := spec.gres_parts) is not None:
        kind = f"Type={gres[1]} " if gres[1] else ""
        last = gres[2] - 1
        devices = f"nvidia[0-{last}]" if last else "nvidia0"
        texts["gres.conf"] = f"Name={gres[0]} {kind}File=/run/sres-node/dev/{devices}\n"
    if spec.topology:
        texts["topology.conf"] = "".join(f"{line}\n" for line in spec.topology)
    if spec.slurmdbd:
        texts["slurmdbd.conf"] = _slurmdbd(plan, lab)
    return texts


def slurm_conf(name: str, spec: LabSpec, plan: ConfPlan, lab: PurePath) -> str:
    """slurm.conf; `spec.options` replace the lab's own values."""
    values = {
        "ClusterName": name,
        "SlurmctldHost": f"ctl({plan.controller})",
        "SlurmctldPort": str(plan.slurmctld_port),
        "SlurmUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={lab}/munge/munge.socket.2",
        "StateSaveLocation": f"{lab}/ctl/state",
        "SlurmdSpoolDir": "/run/sres-node/spool",
        "SlurmctldPidFile": f"{lab}/ctl/run/slurmctld.pid",
        "SlurmdPidFile": "/run/sres-node/slurmd.pid",
        "SlurmctldLogFile": f"{lab}/log/slurmctld.log",
        "SlurmdLogFile": f"{lab}/nodes/%n/log/slurmd.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "MpiDefault": "none",
        "MailProg": "/bin/true",
        # Slurm's own defaults on purpose: detection has to be ours.
        "SlurmdTimeout": "300",
        "ReturnToService": "0",
        "JobRequeue": "1",
        "SchedulerParameters": ",".join(
            ["permit_job_expansion", "batch_sched_delay=0", "sched_interval=5", "bf_interval=5"]
        ),
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SlurmdParameters": "config_overrides",
        "PlugStackConfig": f"{lab}/etc/plugstack.conf",
        "RebootProgram": f"{lab}/bin/reboot-node",
        "PropagateResourceLimits": "NONE",
        "AccountingStorageType": "accounting_storage/none",
    }
    if spec.gres_parts is not None:
        values["GresTypes"] = spec.gres_parts[0]
    if spec.slurmdbd:
        values["AccountingStorageType"] = "accounting_storage/slurmdbd"
        values["AccountingStorageHost"] = "ctl"
        values["AccountingStoragePort"] = str(plan.slurmdbd_port)
        values["AccountingStoragePass"] = f"{lab}/munge/munge.socket.2"
    if spec.topology:
        has_blocks = spec.topology[0].startswith("Block")
        values["TopologyPlugin"] = f"topology/{'block' if has_blocks else 'tree'}"
    given = {key.lower() for key in spec.options}
    if "suspendtime" in given:
        values["SuspendProgram"] = f"{lab}/bin/suspend-node"
        values["ResumeProgram"] = f"{lab}/bin/resume-node"
    values = {key: value for key, value in values.items() if key.lower() not in given}
    values |= {key: value for key, value in spec.options.items() if key.lower() != "partitionname"}
    gres = f" Gres={spec.gres}" if spec.gres else ""
    nodes = [
        f"NodeName={node} NodeAddr={address} Port={port} CPUs={spec.cpus} RealMemory=1000{gres}"
        for node, (address, port) in plan.nodes.items()
    ]
    partition = "main Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP"
    for key, value in spec.options.items():
        if key.lower() == "partitionname":
            partition = value
    lines = [f"{key}={value}" for key, value in values.items()]
    # The first one is the primary.
    lines += [f"SlurmctldHost=ctl2({plan.backup})"] if plan.backup else []
    partitions = [f"PartitionName={text}" for text in (partition, *spec.partitions)]
    return "\n".join([*lines, *nodes, *partitions]) + "\n"


def accounts(text: str, lab: PurePath) -> str:
    """Return a passwd file with the lab's people added to the machine's."""
    known = {line.split(":")[0] for line in text.splitlines()}
    added = [
        f"{name}:x:{uid}:{uid}::{lab}/home/{name}:/bin/bash"
        for name, uid in PEOPLE.items()
        if name not in known
    ]
    return "\n".join([*text.splitlines(), *added]) + "\n"


def groups(text: str) -> str:
    """Return a group file with the lab's people added to the machine's."""
    known = {line.split(":")[0] for line in text.splitlines()}
    added = [f"{name}:x:{gid}:" for name, gid in PEOPLE.items() if name not in known]
    return "\n".join([*text.splitlines(), *added]) + "\n"


def _plugstack(spec: LabSpec, lab: PurePath) -> str:
    if spec.plugin_file() is None:
        return ""
    return f"optional {lab}/bin/sres.so supervisor={lab}/bin/sres-resume\n"


def _hosts(plan: ConfPlan) -> str:
    lines = ["127.0.0.1 localhost", f"{plan.controller} ctl"]
    lines += [f"{plan.backup} ctl2"] if plan.backup else []
    return "\n".join([*lines, *(f"{a} {node}" for node, (a, _) in plan.nodes.items())]) + "\n"


def _slurmdbd(plan: ConfPlan, lab: PurePath) -> str:
    values = {
        "DbdHost": "ctl",
        "DbdAddr": plan.controller,
        "DbdPort": str(plan.slurmdbd_port),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={lab}/munge/munge.socket.2",
        "SlurmUser": "root",
        "LogFile": f"{lab}/log/slurmdbd.log",
        "PidFile": f"{lab}/ctl/slurmdbd.pid",
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "localhost",
        "StorageUser": "root",
        "StorageLoc": "slurm_acct_db",
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _sres(spec: LabSpec, plan: ConfPlan, lab: PurePath) -> str:
    tables: dict[str, dict[str, Any]] = {
        "controller": {
            # Of two controllers either may be the active one.
            "host": "" if spec.backup else "ctl",
            "port": plan.sresctld_port,
            "state_dir": f"{lab}/ctl/sresctld",
        },
        "wire": {"munge_socket": f"{lab}/munge/munge.socket.2"},
        "agent": {"kernel_log": "/run/sres-node/kmsg", "accept_injected": True},
        # The nodes share the machine's file systems, but for /run.
        "checks": {"state_dir": "/run/sres-node/checks"},
        # A lab's faults follow each other more quickly than those of years of a real cluster.
        "breaker": {
            "window": 20.0,
            "quiet": 20.0,
            "nodes_per_hour": 1000,
            "partition_per_hour": 1000,
            "switch_per_hour": 1000,
            "driver_per_hour": 1000,
            "check_per_hour": 1000,
        },
        "recovery": {
            "max_flaps": 1000,
            "max_reboots": 1000,
            "max_replacements": 1000,
            "max_repairs": 1000,
        },
        "replace": {
            "program": [f"{lab}/bin/replace-node"],
            "silent_for": 5.0,
            "max_per_hour": 1000,
        },
    }
    if (scripts := spec.lifecycle_directory()) is not None:
        tables["lifecycle"] = {
            "directory": str(scripts),
            "state_dir": "/run/sres-node/lifecycle",
            "log_dir": "/run/sres-node/lifecycle/log",
            "start_slurmd": [f"{lab}/bin/join-node"],
        }
    top = ""
    for table, values in spec.sres_options.items():
        if isinstance(values, dict):
            tables[table] = tables.get(table, {}) | values
        else:
            top += f"{table} = {_toml(values)}\n"
    return top + "".join(
        f"[{table}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())
        for table, values in tables.items()
    )


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    # JSON's strings, numbers and booleans are TOML's too.
    return json.dumps(value, default=str, ensure_ascii=False)
