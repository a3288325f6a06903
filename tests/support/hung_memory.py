"""A process that hangs in the kernel with the lock on its memory: any reader of its command line or
environment in /proc hangs with it.

`hung_memory.py DIRECTORY [UID]`, as root, in a mount namespace of its own. It maps a file of a file
system that it mounts at DIRECTORY, changes a page, and puts another mapping in its place: the
kernel writes the page back under the lock, and the file system, a child of it, answers no write.
The child creates the file `hangs` beside DIRECTORY when it holds the write. When it is killed, all
go on. Where the kernel does not wait for the write, it says `went on`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from pathlib import Path

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, INIT = 1, 2, 3, 4, 14, 15, 16, 26
INTERRUPT, BATCH_FORGET = 36, 42
ENOSYS, ENODEV = 38, 19
ROOT, FILE, PAGE = 1, 2, 4096
READ_WRITE, SHARED, PRIVATE_FIXED_ANONYMOUS = 3, 1, 0x32

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def attributes(inode: int) -> bytes:
    mode = 0o40755 if inode == ROOT else 0o100644
    return struct.pack("<6Q10I", inode, PAGE, 8, *[0] * 6, mode, 1, 0, 0, 0, PAGE, 0)


def serve(device: int, hangs: Path) -> None:
    while True:
        try:
            request = os.read(device, 1 << 20)
        except OSError as gone:
            if gone.errno == ENODEV:
                return
            continue
        _, opcode, number, inode = struct.unpack_from("<IIQQ", request)
        error, body = 0, b""
        if opcode == INIT:
            _, minor, ahead, _ = struct.unpack_from("<4I", request, 40)
            body = struct.pack("<4I2H2I2H8I", 7, min(minor, 31), ahead, 0, 8, 6, PAGE, 1, *[0] * 10)
        elif opcode in (GETATTR, SETATTR):
            body = struct.pack("<QII", 3600, 0, 0) + attributes(inode)
        elif opcode == LOOKUP:
            body = struct.pack("<4Q2I", FILE, 0, 3600, 3600, 0, 0) + attributes(FILE)
        elif opcode == OPEN:
            body = struct.pack("<QII", 1, 0, 0)
        elif opcode == READ:
            body = bytes(PAGE)
        elif opcode == WRITE:
            hangs.touch()
            continue
        elif opcode in (FORGET, INTERRUPT, BATCH_FORGET):
            continue
        else:
            error = ENOSYS
        os.write(device, struct.pack("<IiQ", 16 + len(body), -error, number) + body)


def main(where: Path, user: int) -> None:
    device = os.open("/dev/fuse", os.O_RDWR)
    words = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    if libc.mount(b"hung", str(where).encode(), b"fuse", 0, words):
        sys.exit(f"cannot be mounted: {os.strerror(ctypes.get_errno())}")
    if os.fork() == 0:
        serve(device, where.with_name("hangs"))
        os._exit(0)
    os.close(device)
    opened = os.open(where / "file", os.O_RDWR)
    os.setuid(user)
    page = libc.mmap(None, PAGE, READ_WRITE, SHARED, opened, 0)
    ctypes.memset(page, 1, 1)
    libc.mmap(page, PAGE, READ_WRITE, PRIVATE_FIXED_ANONYMOUS, -1, 0)
    print("went on", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0)
