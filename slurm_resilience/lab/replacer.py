"""The lab's replacement program: ``replace-node replace|reboot NODE``, run by sresctld.

Safe to run again at any time: an order that is under way already is joined, not repeated. Slurm's
power saving switches nodes off by it too (``power-off``), and a node whose lifecycle scripts ended
well at last has its slurmd started (``join``).
"""

from __future__ import annotations

import sys
import time

from slurm_resilience.errors import SresError
from slurm_resilience.lab.client import ask


def main() -> None:
    """``SOCKET VERB NODE``; exits 0 when the new node has joined."""
    if len(sys.argv) != 4 or sys.argv[2] not in ("replace", "reboot", "power-off", "join"):
        sys.exit("usage: replace-node replace|reboot NODE")
    path, verb, node = sys.argv[1:]
    began = time.monotonic()
    print(f"{verb} {node}: asking the lab's keeper", flush=True)
    try:
        seen = ask(path, {"do": verb, "nodes": [node]})["nodes"][node]
    except SresError as error:
        print(f"{verb} {node}: failed: {error}", flush=True)
        sys.exit(error.exit_code)
    if verb == "power-off":
        return
    took = time.monotonic() - began
    print(f"{verb} {node}: joined as instance {seen['instance']} after {took:.1f} s", flush=True)
