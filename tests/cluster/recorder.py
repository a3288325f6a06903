"""The real wire server with a handler that prints what it hears, one JSON line a message.

python recorder.py '{"n1": "10.0.0.1:6818", …}'
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import msgspec

from slurm_resilience import config
from slurm_resilience.wire.messages import Hello, Message
from slurm_resilience.wire.server import Client, Server


class Printer:
    def __init__(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses

    def authorize(self, hello: Hello, uid: int, address: str) -> tuple[str, ...]:
        return tuple(a for node, a in self.addresses.items() if node != hello.subject)

    def opened(self, peer: Client) -> None:
        pass

    def received(self, peer: Client, message: Message) -> None:
        said: dict[str, Any] = msgspec.to_builtins(message)
        print(json.dumps(said | {"node": peer.subject}), flush=True)

    def closed(self, peer: Client) -> None:
        pass


settings = config.load()
server = Server(
    Printer(json.loads(sys.argv[1])),
    settings.controller.port,
    munge_socket=settings.wire.munge_socket,
)
server.start()
threading.Event().wait()
