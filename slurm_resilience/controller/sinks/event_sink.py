"""The kinds of sink: a web address, a command, a file. Each takes a batch of events, or raises."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import os
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from slurm_resilience import __version__
from slurm_resilience.config import SinkSettings
from slurm_resilience.controller.pages import public_event
from slurm_resilience.errors import SresError

MAX_ERROR_BYTES = MAX_ERROR_CHARACTERS = 300
ALIVE = "alive"
"""The kind of what is sent to show that sresctld works."""
# O_NONBLOCK: a FIFO that nothing reads must not be waited for.
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C"}


class EventSink(Protocol):
    """A place that takes events."""

    def send(self, events: Sequence[dict[str, Any]]) -> None:
        """Hand over a batch, oldest first.

        Raises:
            SresError: it was not taken; it is sent again.
        """
        ...


def make_sink(settings: SinkSettings) -> EventSink:
    """Return the sink of a table of the configuration."""
    if settings.url:
        return WebSink(settings.url, settings.token_file, settings.timeout)
    if settings.command:
        return CommandSink(settings.command, settings.timeout)
    return FileSink(Path(settings.file))


class WebSink:
    """POSTs `{"events": […]}` to an address; any 2xx takes it."""

    def __init__(self, url: str, token_file: str, timeout: float) -> None:
        self._url, self._token_file, self._timeout = url, token_file, timeout
        self._opener = urllib.request.build_opener(_NoRedirect)

    def send(self, events: Sequence[dict[str, Any]]) -> None:
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"slurm-resilience/{__version__}",
        }
        if self._token_file:
            headers["Authorization"] = f"Bearer {_read_token(self._token_file)}"
        body = msgspec.json.encode({"events": events})
        try:
            request = urllib.request.Request(self._url, body, headers, method="POST")
            self._opener.open(request, timeout=self._timeout).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise SresError(f"it answered {error.code} {_plain(error.reason)}") from None
        # These name the URL, or the header with the token, which are no texts for a log.
        except (ValueError, http.client.InvalidURL):
            raise SresError("its url cannot be used: it has a sign that URLs do not have") from None
        except (OSError, urllib.error.URLError) as error:
            raise SresError(_plain(getattr(error, "reason", "") or error)) from None
        except Exception as error:  # http.client.HTTPException and its like: an answer that is none
            raise SresError(f"it does not speak HTTP: {_plain(repr(error))}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirections: the token is for the address that the site has written down."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _plain(text: object) -> str:
    """Return the beginning of what a server said, for the log."""
    line = " ".join(str(text).split())[:MAX_ERROR_CHARACTERS]
    return "".join(char if char.isprintable() else "?" for char in line)


def _read_token(path: str) -> str:
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise SresError(f"token_file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        token = ""
    # One that is refused later would be named, whole, in the error.
    if not (token.isprintable() and token):
        raise SresError(f"token_file {path} must hold one line of ASCII, the token") from None
    return token


class CommandSink:
    """Starts a command with the events on its standard input, a line of JSON each; 0 takes them."""

    def __init__(self, argv: Sequence[str], timeout: float) -> None:
        self._argv, self._timeout = list(argv), timeout

    def send(self, events: Sequence[dict[str, Any]]) -> None:
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as lines:
            lines.write(as_lines(events))
            lines.seek(0)
            try:
                child = subprocess.Popen(
                    self._argv,
                    stdin=lines,
                    stdout=subprocess.DEVNULL,
                    stderr=said,
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:
                raise SresError(f"{self._argv[0]} cannot be started: {error}") from None
            code = _wait(child, self._timeout)
            if code == 0:
                return
            said.seek(0)
            text = _plain(said.read(MAX_ERROR_BYTES).decode("utf-8", "replace"))
            raise SresError(f"{self._argv[0]} ended with {code}{': ' if text else ''}{text}")


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int:
    """Wait for the end of a command, of which nothing may stay.

    Raises:
        SresError: it took too long; it was killed.
    """
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        raise SresError(f"no end within {seconds:g} s; it was killed") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


class FileSink:
    """Adds a line of JSON for each event to a file, which may be renamed at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_torn = False
        """The last line is not whole: the disk was full."""

    def send(self, events: Sequence[dict[str, Any]]) -> None:
        # The torn line gets its end, so that the next one is whole.
        text = b"\n" * self._is_torn + as_lines(events)
        try:
            file = os.open(self._path, _APPEND, 0o640)
            try:
                written = os.write(file, text)
            finally:
                os.close(file)
        except OSError as error:
            raise SresError(f"{self._path}: {error.strerror}") from None
        self._is_torn = written < len(text)
        if self._is_torn:
            raise SresError(f"{self._path}: the disk is full")


def as_lines(events: Sequence[dict[str, Any]]) -> bytes:
    """Return events as lines of JSON."""
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def as_sent(event: Mapping[str, Any], cluster: str) -> dict[str, Any]:
    """Return an event of the journal as sinks get it: without what any user may not read."""
    at = datetime.datetime.fromtimestamp(event["at"], datetime.UTC)
    time = at.isoformat(timespec="milliseconds")
    return {"cluster": cluster, "time": time, **public_event(dict(event))}


def alive(cluster: str, sentence: str, now: float) -> dict[str, Any]:
    """Return what shows that sresctld works, with the sentence of its last cycle."""
    event = {"id": 0, "at": now, "kind": ALIVE, "node": "", "job": 0, "incident": 0}
    return as_sent({**event, "text": sentence, "data": {}}, cluster)
