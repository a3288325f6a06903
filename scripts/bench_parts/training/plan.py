"""Plan what is measured, in which order: each part gives some of the keys, once a round."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import faults
import figures
import ours
import overhead
import stores
from drive import HERE, RunFailed
from rivals import Rivals

sys.path.insert(0, str(HERE.parent))
PAIRS_A_ROUND = 25
STORES_SECONDS = 150


class Part(NamedTuple):
    """One run that is repeated."""

    name: str
    keys: tuple[str, ...]
    run: Callable[[], dict[str, float]]
    rival: str = ""
    """The rival whose package it needs."""
    once: bool = False
    """It repeats itself: its figures are medians already."""
    own_n: int = 1
    """The number of ranks, then."""


def parts(rivals: Rivals, repeats: int) -> list[Part]:
    """All of them."""
    found = [
        Part("exception", ("exception_all_s",), ours.exception),
        Part(
            f"{ours.RECOVERIES} exceptions right after backward",
            ("exception_after_backward_p99_s",),
            ours.after_backward,
            once=True,
            own_n=ours.RECOVERIES,
        ),
        Part(
            f"{ours.RECOVERIES} of them, the model in parts",
            ("exception_after_backward_hsdp_p99_s",),
            lambda: ours.after_backward(replica_size=2),
            once=True,
            own_n=ours.RECOVERIES,
        ),
        Part(
            "SIGKILL, cold",
            ("sigkill_survivors_s", "sigkill_all_cold_s"),
            lambda: ours.sigkill(warm=False),
        ),
        Part("SIGKILL, warm", ("sigkill_all_warm_s",), lambda: ours.sigkill(warm=True)),
        Part(
            "no library, SIGKILL, warm",
            ("plain_sigkill_warm_s", "plain_import_warm_s"),
            lambda: ours.plain(warm=True),
        ),
        Part(
            "no library, SIGKILL, cold",
            ("plain_sigkill_cold_s", "plain_import_cold_s"),
            lambda: ours.plain(warm=False),
        ),
        Part("hang", ("hang_detect_s", "hang_recover_s"), ours.hang),
    ]
    for fault in ("exception", "sigkill"):
        key = f"torchrun_{fault}_all_s"
        run = lambda f=fault: faults.torchrun(rivals, f)  # noqa: E731
        found.append(Part(f"torchrun, {fault}", (key,), run, "torchrun"))
    found.append(
        Part(
            "checkpoint and restart",
            ("checkpoint_restart_s",),
            lambda: faults.torchrun(rivals, "sigkill", checkpoint=True),
            "torchrun",
        )
    )
    for fault, key in (
        ("exception", "nvrx_exception_all_s"),
        ("sigkill", "nvrx_sigkill_survivors_s"),
    ):
        run = lambda f=fault: faults.nvrx(rivals, f)  # noqa: E731
        found.append(Part(f"nvidia-resiliency-ext, {fault}", (key,), run, "nvrx"))
    keys = ("torchft_sigkill_survivors_s", "torchft_sigkill_all_s")
    found.append(Part("torchft, sigkill", keys, lambda: faults.torchft(rivals), "torchft"))
    for size in figures.SIZES:
        keys = tuple(f"{kind}_init_{size}_s" for kind in stores.KINDS if kind != "rootless_cold")
        found.append(Part(f"forming, {size} ranks", keys, lambda n=size: _stores(n)))
    keys = ("first_batch_after_restart_s", "first_batch_rebuilt_s")
    found.append(Part("first batch", keys, lambda: _data(repeats), once=True, own_n=repeats))
    keys = ("peer_restore_gbps", "bare_send_gbps")
    found.append(Part("peer restore", keys, _peer_restore, once=True, own_n=5))
    return found


def chosen(found: Iterable[Part], only: Iterable[str]) -> list[Part]:
    """Return the parts that give at least one of these keys; no keys: all."""
    wanted = set(only)
    return [part for part in found if not wanted or wanted & set(part.keys)]


def costs(repeats: int) -> dict[str, dict[str, object]]:
    """Return what the library costs while nothing fails, by key; shares: 0.01 is one per cent."""
    found = overhead.measure(PAIRS_A_ROUND * repeats)
    return {
        "step_overhead": figures.overhead(found.seconds),
        "step_cpu_us": figures.extra(found.cpu_seconds["all"], overhead.BLOCK_STEPS),
        "step_cpu_main_us": figures.extra(found.cpu_seconds["main"], overhead.BLOCK_STEPS),
        "step_cpu_mesh_us": figures.extra(found.cpu_seconds["mesh"], overhead.BLOCK_STEPS),
        "step_update_us": figures.summary(1e6 * seconds for seconds in found.update_seconds),
        "step_warm_us": figures.summary(1e6 * seconds for seconds in found.warm_seconds),
        "digest_overhead": figures.summary(found.digest_shares),
    }


def _stores(size: int) -> dict[str, float]:
    argv = [sys.executable, str(HERE / "stores.py"), str(size), *stores.KINDS]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=STORES_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"no group of {size} within {STORES_SECONDS} s") from None
    if done.returncode != 0:
        raise RunFailed(f"no group of {size}: {(done.stderr.splitlines() or ['?'])[-1]}")
    found: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    for error in found.values():
        if isinstance(error, str):
            print(f"failed: {error}", file=sys.stderr)
    times = {kind: value for kind, value in found.items() if isinstance(value, float)}
    return {f"{kind}_init_{size}_s": seconds for kind, seconds in times.items()}


def _data(repeats: int) -> dict[str, float]:
    import data_restart

    return data_restart.measure(repeats)


def _peer_restore() -> dict[str, float]:
    import peer_restore

    return peer_restore.run()
