"""A file system whose file `hung` answers no look-up until another file exists.

`hung_fs.py MOUNTPOINT RELEASE`, as root. A process that asks for it waits in the kernel, where
SIGKILL does not end it: what a dead file server does to a job. It says `held` for each look-up.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import sys
from pathlib import Path

ENOENT, ENOSYS, ENODEV = 2, 38, 19
LOOKUP, FORGET, GETATTR, INIT, INTERRUPT, BATCH_FORGET = 1, 2, 3, 26, 36, 42
DIRECTORY = struct.pack("<6Q10I", 1, *[0] * 5, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)


def mount(where: str) -> int:
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    words = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", where.encode(), b"fuse", 0, words):
        sys.exit(f"cannot be mounted: {os.strerror(ctypes.get_errno())}")
    return device


def serve(device: int, release: Path) -> None:
    held: list[int] = []

    def answer(number: int, error: int = 0, body: bytes = b"") -> None:
        try:
            os.write(device, struct.pack("<IiQ", 16 + len(body), -error, number) + body)
        except OSError as refused:
            if refused.errno != ENOENT:  # its caller has gone
                raise

    while True:
        ready, _, _ = select.select([device], [], [], 0.2)
        if release.exists():
            while held:
                answer(held.pop(), ENOENT)
        if not ready:
            continue
        try:
            request = os.read(device, 1 << 17)
        except OSError as gone:
            if gone.errno == ENODEV:
                return  # unmounted
            continue
        _, opcode, number = struct.unpack_from("<IIQ", request)
        if opcode == INIT:
            _, minor, ahead, _ = struct.unpack_from("<4I", request, 40)
            version = struct.pack(
                "<4I2H2I2H8I", 7, min(minor, 31), ahead, 0, 8, 6, 4096, 1, *[0] * 10
            )
            answer(number, 0, version)
        elif opcode == GETATTR:
            answer(number, 0, struct.pack("<QII", 3600, 0, 0) + DIRECTORY)
        elif opcode == LOOKUP and request[40:].rstrip(b"\0") == b"hung":
            held.append(number)
            print("held", flush=True)
        elif opcode not in (FORGET, INTERRUPT, BATCH_FORGET):
            answer(number, ENOENT if opcode == LOOKUP else ENOSYS)


if __name__ == "__main__":
    opened = mount(sys.argv[1])
    print("mounted", flush=True)
    serve(opened, Path(sys.argv[2]))
