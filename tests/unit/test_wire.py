"""The wire over real sockets and a real munged of the test's own: who may speak."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from wire_peers import (
    ALICE,
    BOB,
    EVENT,
    KEY,
    NEEDS_MUNGE,
    Sresctld,
    as_user,
    exactly,
    hello,
    read,
    until,
)

from slurm_resilience.errors import (
    AuthError,
    NotFound,
    NotPermitted,
    WireError,
)
from slurm_resilience.model import Node
from slurm_resilience.wire import munge, seal
from slurm_resilience.wire.client import Connection
from slurm_resilience.wire.messages import (
    FRAMES,
    Beat,
    Challenge,
    Hello,
    NodeHello,
    PauseRequest,
    Refused,
    Status,
    StatusRequest,
    Welcome,
)
from slurm_resilience.wire.server import Server

pytestmark = NEEDS_MUNGE


def test_both_sides_prove_themselves(sresctld: Sresctld) -> None:
    with sresctld.connect() as connection:
        answer = connection.ask(StatusRequest("history", "n1", 5))
        assert answer == Status({"events": [{"node": "n1", "limit": 5} | EVENT]})


def test_what_is_not_there_is_no_silence_of_sresctld(sresctld: Sresctld) -> None:
    """The exit code tells them apart."""

    def none(asked: StatusRequest) -> tuple[dict[str, Any], str]:
        raise NotFound(f"the journal has no incident {asked.incident}")

    sresctld.inbox._history = none
    with sresctld.connect() as connection, pytest.raises(NotFound, match="no incident 999"):
        connection.ask(StatusRequest("incidents", incident=999))


def test_a_node_is_told_of_its_peers(sresctld: Sresctld) -> None:
    with sresctld.connect("node", "n1") as connection:
        assert set(connection.welcome.peers) == {"127.0.0.1:6819", "192.0.2.1:6818"}
        connection.send(NodeHello("boot-1", "machine"))
        connection.send(Beat(1))
        until(lambda: sresctld.registry.agents().get("n1", None), "n1 is known")
        until(lambda: sresctld.registry.agents()["n1"].boot_id == "boot-1", "its boot is known")


@pytest.mark.parametrize("subject", ["far", "n9", "", "n1 "])
def test_a_node_speaks_for_itself_only(sresctld: Sresctld, subject: str) -> None:
    with pytest.raises(NotPermitted):
        sresctld.connect("node", subject)


@pytest.mark.parametrize("subject", ["", "x", "-7", "²", "7x", "9" * 30, "9" * 5000])
def test_what_is_no_job(sresctld: Sresctld, subject: str) -> None:
    with pytest.raises(WireError, match="is not a job id"):
        sresctld.connect("job", subject)


def test_a_job_that_is_not_there(sresctld: Sresctld) -> None:
    with pytest.raises(NotPermitted, match="does not exist"):
        sresctld.connect("job", "99")


@pytest.mark.parametrize(
    ("uid", "role", "subject", "says"),
    [
        (ALICE, "job", "7", "welcome"),
        (BOB, "job", "7", "NotPermitted"),
        (ALICE, "job", "8", "NotPermitted"),
        (ALICE, "node", "n1", "NotPermitted"),
        (ALICE, "query", "", "only root and SlurmUser may pause"),
    ],
)
def test_users(sresctld: Sresctld, uid: int, role: str, subject: str, says: str) -> None:
    said = as_user(uid, sresctld, role, subject)
    assert says in said
    assert "Traceback" not in said
    assert sresctld.registry.agents() == {} and sresctld.inbox.take() == ()


def test_a_credential_of_another_key_is_refused(
    sresctld: Sresctld, munged: Callable[[str], str]
) -> None:
    with pytest.raises(AuthError):
        sresctld.connect(munge_socket=munged("foreign"))


def test_a_credential_is_good_for_one_connection(sresctld: Sresctld) -> None:
    first, challenge = sresctld.raw()
    message = FRAMES.pack(hello(challenge.nonce, sresctld))
    first.sendall(message)
    assert isinstance(read(first), Welcome)
    second, _ = sresctld.raw()
    second.sendall(message)
    answer = read(second)
    assert isinstance(answer, Refused) and "Replayed" in answer.reason
    assert read(second) is None


@pytest.mark.parametrize(("role", "subject"), [("node", "n1"), ("query", "x"), ("job", "8")])
def test_a_credential_for_another_role_or_nonce(
    sresctld: Sresctld, role: str, subject: str
) -> None:
    """Stolen from the same user, made fresh, never used: still not for this."""
    sock, challenge = sresctld.raw()
    made = hello(challenge.nonce, sresctld, role, subject)
    sock.sendall(FRAMES.pack(msgspec.structs.replace(made, role="job", subject="7")))
    assert "another connection" in read(sock).reason
    sock, _ = sresctld.raw()
    sock.sendall(FRAMES.pack(hello(b"0" * 32, sresctld)))
    assert "another connection" in read(sock).reason


def test_a_credential_with_another_payload(sresctld: Sresctld) -> None:
    for payload in (b"", b"hello", b"\x90", os.urandom(100)):
        sock, _ = sresctld.raw()
        credential = munge.encode(payload, sresctld.munge_socket)
        sock.sendall(FRAMES.pack(Hello(credential, "node", "n1")))
        assert isinstance(read(sock), Refused)


def test_another_protocol_is_named(sresctld: Sresctld) -> None:
    sock, challenge = sresctld.raw()
    newer = msgspec.structs.replace(hello(challenge.nonce, sresctld), protocol=99)
    sock.sendall(FRAMES.pack(newer))
    assert "protocol 99 is spoken there" in read(sock).reason


def impostor(reply: Callable[[Hello], Welcome], uid: int = 0) -> tuple[int, threading.Thread]:
    """A program that poses as sresctld and answers the hello with what it can make."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        with listener, listener.accept()[0] as sock:
            sock.settimeout(10)
            sock.sendall(FRAMES.pack(Challenge(b"c" * 32, uid)))
            if hello := read(sock):
                sock.sendall(FRAMES.pack(reply(hello)))
                exactly(sock, 1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return port, thread


def test_an_impostor_of_sresctld_is_found_out(munged: Callable[[str], str]) -> None:
    ours = munged("ours")
    for reply in (
        lambda hello: Welcome(hello.credential),
        lambda hello: Welcome(b""),
        lambda hello: seal.welcome(KEY, ("n9:1",)),
    ):
        port, thread = impostor(reply)
        with pytest.raises(AuthError, match="could not read our credential"):
            Connection.open("127.0.0.1", port, "query", munge_socket=ours)
        thread.join(timeout=10)


def test_an_impostor_under_its_own_name_is_told_nothing(munged: Callable[[str], str]) -> None:
    said: list[Hello] = []

    def listen(hello: Hello) -> Welcome:
        said.append(hello)
        return Welcome(b"")

    port, thread = impostor(listen, BOB)
    with pytest.raises(AuthError, match=f"is not sresctld: it runs as uid {BOB}"):
        Connection.open("127.0.0.1", port, "query", munge_socket=munged("ours"))
    thread.join(timeout=10)
    assert said == []


def test_a_credential_is_for_sresctlds_user_alone(munged: Callable[[str], str]) -> None:
    """Else a program between the two would have the key, and could speak for either."""
    code = "import sys; from slurm_resilience.wire import munge; munge.decode(*eval(sys.argv[1]))"
    made = munge.encode(b"key", munged("ours"), only_uid=0)
    user = ["setpriv", f"--reuid={BOB}", f"--regid={BOB}", "--clear-groups"]
    argv = [*user, sys.executable, "-c", code, repr((made, munged("ours")))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    assert "AuthError" in done.stderr and "Unauthorized" in done.stderr


def relay(sresctld: Sresctld, change: Callable[[bytes], bytes]) -> int:
    """A program between a client and sresctld that hands on what each says, but changes the
    client's frames after the hello."""
    listener = socket.create_server(("127.0.0.1", 0))

    def down(client: socket.socket, up: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := up.recv(65536):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with listener, listener.accept()[0] as client:
            up = socket.create_connection(("127.0.0.1", sresctld.server.port), timeout=10)
            threading.Thread(target=down, args=(client, up), daemon=True).start()
            with up, contextlib.suppress(OSError):
                frames = 0
                while head := exactly(client, 4):
                    body = exactly(client, FRAMES.unpack_length(head))
                    body = change(body) if frames else body
                    frames += 1
                    up.sendall(FRAMES.frame(body))

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def test_a_relay_cannot_speak_for_a_client(sresctld: Sresctld) -> None:
    """It may pass root's handshake on; a frame of its own ends the connection."""
    forged = FRAMES.encode(PauseRequest("by the relay"))
    for change in (
        lambda body: forged,
        lambda body: forged + body[-seal.TAG_BYTES :],
        lambda body: body[:-1] + bytes([body[-1] ^ 1]),
    ):
        port = relay(sresctld, change)
        with (
            Connection.open(
                "127.0.0.1", port, "query", munge_socket=sresctld.munge_socket
            ) as connection,
            pytest.raises(WireError, match=r"was changed on its way|is lost"),
        ):
            connection.ask(StatusRequest("status"))
    assert sresctld.inbox.take() == ()


def test_a_frame_is_good_once_and_in_its_place() -> None:
    sender, receiver = (seal.FrameSeal(KEY, seal.FROM_CLIENT) for _ in range(2))
    first, second = sender.close(b"one"), sender.close(b"two")
    assert receiver.open(first) == b"one"
    for wrong in (first, b"", b"two", second[:-1]):
        other = seal.FrameSeal(KEY, seal.FROM_CLIENT)
        other.open(first)
        with pytest.raises(WireError):
            other.open(wrong)
    with pytest.raises(WireError):
        seal.FrameSeal(KEY, seal.FROM_SERVER).open(first)
    assert receiver.open(second) == b"two"


def test_another_protocol_is_named_to_the_client_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(FRAMES.pack(Challenge(b"c" * 32, 0, 1)))
                exactly(sock, 1)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(WireError, match="protocol 1 is spoken there"):
            Connection.open("127.0.0.1", port, "query")


@pytest.mark.parametrize(("code", "kind"), [(15, "Expired"), (16, "Rewound")])
def test_a_credential_of_another_date_asks_for_the_dates(code: int, kind: str) -> None:
    with munge._Context("") as context, pytest.raises(AuthError, match=f"{kind}.*the date of both"):
        context.check(code, "")


def test_no_munged_is_one_clear_line(sresctld: Sresctld, tmp_path: Path) -> None:
    with pytest.raises(AuthError, match="is munged running here"):
        sresctld.connect(munge_socket=str(tmp_path / "none"))


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(WireError, match="does not answer"):
        Connection.open("127.0.0.1", port, "query")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the kernel has no IPv6")
def test_nodes_of_both_families_are_let_in(sresctld: Sresctld) -> None:
    """sresctld listens on all addresses; a node is known by name or by number."""
    nodes = (
        Node("n6", "IDLE", address="::1"),
        Node("both", "IDLE", address="localhost"),
        Node("host", "IDLE", address="192.0.2.7", hostname="localhost"),
        Node("other", "IDLE", address="2001:db8::1"),
    )
    sresctld.inbox.know(nodes, {})
    every = Server(sresctld.inbox, 0, munge_socket=sresctld.munge_socket)
    every.start()
    try:
        for host in ("::1", "127.0.0.1"):
            for name in ("n6", "both", "host"):
                Connection.open(
                    host, every.port, "node", name, munge_socket=sresctld.munge_socket
                ).close()
            with pytest.raises(NotPermitted, match="is not the address of node other"):
                Connection.open(
                    host, every.port, "node", "other", munge_socket=sresctld.munge_socket
                )
    finally:
        every.stop()


def test_a_port_that_is_taken(sresctld: Sresctld) -> None:
    with pytest.raises(WireError, match="is another sresctld running"):
        Server(sresctld.inbox, sresctld.server.port, "127.0.0.1")
