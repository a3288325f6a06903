"""munge says who speaks: encode and decode credentials through libmunge.

A thin ctypes binding: libmunge comes with every Slurm, while the Python bindings for it need a
compiler and its headers on each node.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

from slurm_resilience.errors import AuthError, MissingTool

_OPT_SOCKET = 8  # MUNGE_OPT_SOCKET of munge.h
_OPT_UID_RESTRICTION = 9  # MUNGE_OPT_UID_RESTRICTION
_OF_DATES = (15, 16)  # EMUNGE_CRED_EXPIRED, EMUNGE_CRED_REWOUND: by five minutes


class Identity(NamedTuple):
    """The user who made a credential, and its content."""

    uid: int
    gid: int
    payload: bytes


@functools.cache
def _library() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    try:
        munge = ctypes.CDLL("libmunge.so.2")
    except OSError:
        raise MissingTool("libmunge.so.2 is not installed; install libmunge2 (munge)") from None
    munge.munge_ctx_create.restype = ctypes.c_void_p
    munge.munge_ctx_destroy.argtypes = [ctypes.c_void_p]
    munge.munge_strerror.restype = ctypes.c_char_p
    munge.munge_ctx_strerror.argtypes = [ctypes.c_void_p]
    munge.munge_ctx_strerror.restype = ctypes.c_char_p
    munge.munge_encode.argtypes = [
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int,
    ]
    munge.munge_decode.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(ctypes.c_uint32),
        ctypes.POINTER(ctypes.c_uint32),
    ]
    libc = ctypes.CDLL(None)
    libc.free.argtypes = [ctypes.c_void_p]
    return munge, libc


class _Context:
    """A munge context for one call, bound to one munged."""

    def __init__(self, socket: str) -> None:
        self.munge, self.libc = _library()
        self.ctx = ctypes.c_void_p(self.munge.munge_ctx_create())
        if not self.ctx:
            raise AuthError("munge: no context (out of memory)")
        if socket:
            self.set(_OPT_SOCKET, ctypes.c_char_p(socket.encode()), socket)

    def set(self, option: int, value: ctypes.c_char_p | ctypes.c_uint32, socket: str) -> None:
        """Set an option of the context."""
        # The function takes any type behind the option: ctypes cannot be told which.
        self.check(self.munge.munge_ctx_set(self.ctx, ctypes.c_int(option), value), socket)

    def check(self, code: int, socket: str) -> None:
        """Raise when libmunge's return code is not success."""
        if code:
            text = self.munge.munge_ctx_strerror(self.ctx) or self.munge.munge_strerror(code)
            place = f" (socket {socket})" if socket else ""
            hint = (
                "is the date of both machines right?"
                if code in _OF_DATES
                else "is munged running here, with the cluster's key?"
            )
            raise AuthError(f"munge: {text.decode(errors='replace')}{place}; {hint}")

    def __enter__(self) -> _Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.munge.munge_ctx_destroy(self.ctx)


def encode(payload: bytes, socket: str = "", only_uid: int | None = None) -> bytes:
    """Make a credential of this process's user over ``payload``.

    Args:
        payload: any bytes; munge encrypts them.
        socket: munged's socket; empty: munge's default.
        only_uid: munged decodes it for this user alone; None: for every user.

    Raises:
        AuthError: no munged answers, or it has no key.
        MissingTool: libmunge is not installed.
    """
    with _Context(socket) as context:
        if only_uid is not None:
            context.set(_OPT_UID_RESTRICTION, ctypes.c_uint32(only_uid), socket)
        out = ctypes.c_void_p()
        code = context.munge.munge_encode(ctypes.byref(out), context.ctx, payload, len(payload))
        context.check(code, socket)
        try:
            return ctypes.string_at(out.value or 0)
        finally:
            context.libc.free(out)


def decode(credential: bytes, socket: str = "") -> Identity:
    """Check ``credential``; return its maker and its payload.

    Raises:
        AuthError: forged, expired, replayed or made with another key; or no munged answers.
        MissingTool: libmunge is not installed.
    """
    with _Context(socket) as context:
        out, size = ctypes.c_void_p(), ctypes.c_int()
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        code = context.munge.munge_decode(
            credential,
            context.ctx,
            ctypes.byref(out),
            ctypes.byref(size),
            ctypes.byref(uid),
            ctypes.byref(gid),
        )
        try:
            # An expired or replayed credential still fills the payload: the code decides.
            context.check(code, socket)
            payload = ctypes.string_at(out.value, size.value) if out.value else b""
            return Identity(uid.value, gid.value, payload)
        finally:
            if out.value:
                context.libc.free(out)
