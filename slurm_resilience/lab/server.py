"""The keeper's control socket: what the command line and the API can ask of a running lab."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from slurm_resilience.errors import LabError, SresError, UsageError
from slurm_resilience.lab.cluster import LabCluster

LONGEST_ORDER = 65536


def serve(cluster: LabCluster, path: Path) -> asyncio.Task[None]:
    """Listen on a socket that only root can reach."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    return asyncio.create_task(_accept(listener, cluster))


async def _accept(listener: socket.socket, cluster: LabCluster) -> None:
    loop = asyncio.get_running_loop()
    talks: set[asyncio.Task[None]] = set()
    while True:
        channel, _ = await loop.sock_accept(listener)
        talk = asyncio.create_task(_talk(channel, cluster))
        talks.add(talk)
        talk.add_done_callback(talks.discard)


async def _talk(channel: socket.socket, cluster: LabCluster) -> None:
    loop, data = asyncio.get_running_loop(), b""
    handles: list[int] = []
    with channel:
        try:
            while not data.endswith(b"\n"):
                part = await loop.sock_recv(channel, 65536)
                if not part or len(data) > LONGEST_ORDER:
                    return
                data += part
            reply = await _obey(cluster, json.loads(data), handles)
        except SresError as error:
            reply = {"error": str(error), "kind": type(error).__name__}
        except Exception as error:  # the border: one bad order must not end the lab
            traceback.print_exc()
            reply = {"error": f"the keeper could not do that: {error!r}", "kind": "LabError"}
        await _answer(channel, reply, handles)


async def _answer(channel: socket.socket, reply: dict[str, Any], handles: list[int]) -> None:
    line = json.dumps(reply).encode() + b"\n"
    try:
        if handles:
            socket.send_fds(channel, [line], handles)
        else:
            await asyncio.get_running_loop().sock_sendall(channel, line)
    except OSError:
        pass  # The one who asked has gone; what was asked is done all the same.
    finally:
        for handle in handles:
            os.close(handle)


async def _obey(cluster: LabCluster, order: dict[str, Any], handles: list[int]) -> dict[str, Any]:
    verb = order["do"]
    if verb == "status":
        return cluster.status()
    names: list[str] = order.get("nodes", [])
    if verb == "enter":
        handles.append(cluster.place(names[0]).open_handle())
        return {}
    if verb in ("daemon-start", "daemon-kill"):
        await cluster.daemon(verb, order["daemon"], names, int(order.get("signal", 15)))
        return {}
    nodes = [cluster.place(name) for name in names]
    actions: dict[str, Callable[[Any], Coroutine[Any, Any, None]]] = {
        "power-on": lambda node: node.power_on(),
        "power-off": lambda node: node.power_off(),
        "reboot": lambda node: node.reboot(),
        "replace": lambda node: node.replace(),
        "join": lambda node: node.join(),
        "cut": cluster.cut,
        "mend": cluster.mend,
    }
    if verb not in actions:
        raise UsageError(f"unknown order '{verb}'")
    controllers = sorted(set(names) & set(cluster.controllers))
    if controllers and verb in ("reboot", "replace", "join"):
        raise UsageError(f"{verb} is for nodes, not for {controllers[0]}")
    ends = await asyncio.gather(*(actions[verb](node) for node in nodes), return_exceptions=True)
    faults = [end for end in ends if isinstance(end, BaseException)]
    if faults:
        expected = all(isinstance(fault, SresError) for fault in faults)
        raise LabError("; ".join(str(fault) if expected else repr(fault) for fault in faults))
    return {"nodes": {node.name: node.describe() for node in nodes}}
