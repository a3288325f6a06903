"""No test asserts how long something takes: a loaded machine finds no bugs."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", settings.default, deadline=None)
settings.load_profile("unhurried")
