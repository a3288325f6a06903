"""Lines that healthy machines write to their system log, made from a seed.

Each template is one kind of line; words in braces are filled in anew for each line. Many of them
resemble a fault: they name the drivers, the words and the numbers that fault lines have.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "data"
KERNEL_LINES = DATA / "ordinary_kernel_lines.txt"
PROGRAM_LINES = DATA / "ordinary_program_lines.txt"
"""Name of the program, number of its process, text."""

WORDS = ("alpha", "trainer", "node", "gather", "report", "cache", "proxy", "sync", "mover")
USERS = ("ada", "grace", "alan", "root", "postgres", "admin")


def kinds() -> tuple[str, ...]:
    """Return the templates, those of programs first."""
    kernel = KERNEL_LINES.read_text(encoding="utf-8").splitlines()
    programs = PROGRAM_LINES.read_text(encoding="utf-8").splitlines()
    return (*programs, *(f"kernel: {line}" for line in kernel))


def ordinary_lines(count: int, seed: int) -> Iterator[str]:
    """Yield lines of every kind, in any order, with the stamps of a syslog file."""
    rng = random.Random(seed)
    templates = list(kinds())
    at = 0
    for index in range(count):
        if index % len(templates) == 0:
            rng.shuffle(templates)
        at += rng.randrange(0, 20)
        hour, minute, second = at // 3600 % 24, at // 60 % 60, at % 60
        text = _filled(templates[index % len(templates)], rng)
        if text.startswith("kernel: "):
            text = f"kernel: [{at}.{rng.randrange(10**6):06d}] {text.removeprefix('kernel: ')}"
        day = 1 + at // 86400
        yield f"Mar {day:2d} {hour:02d}:{minute:02d}:{second:02d} gpu{seed} {text}"


def _filled(template: str, rng: random.Random) -> str:
    words = {
        "{num}": lambda: str(rng.randrange(10_000, 10_000_000)),
        "{n}": lambda: str(rng.randrange(0, 10)),
        "{pid}": lambda: str(rng.randrange(300, 99_999)),
        "{hex}": lambda: f"{rng.randrange(16**8):08x}",
        "{bus}": lambda: f"{rng.randrange(256):02x}",
        "{ip}": lambda: ".".join(str(rng.randrange(1, 255)) for _ in range(4)),
        "{mac}": lambda: ":".join(f"{rng.randrange(256):02x}" for _ in range(6)),
        "{word}": lambda: rng.choice(WORDS),
        "{user}": lambda: rng.choice(USERS),
    }
    for name, value in words.items():
        while name in template:
            template = template.replace(name, value(), 1)
    return template
