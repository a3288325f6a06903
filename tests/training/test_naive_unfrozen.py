"""Programs that freeze and unfreeze parameters while they train, as a user would write them: each
trains as it would on one rank, or is refused."""

from __future__ import annotations

import subprocess

import pytest
from naive import WEIGHTS, Program, refused, told_nothing

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

PARTS = """
def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_({trains})
    return model, torch.optim.SGD(model.parameters(), 0.1)
"""
MICROBATCHES = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = {net}
for step in s.microbatches(DATA, net, size=2, count=4, steps=6, epochs=None{more}):
    if step.consumed == 16:
        {unfreeze}
    for x, y in step:
        {before}
        step.backward(nn.functional.mse_loss(net(x), y))
    with s.update():
        opt.step()
    if step.consumed == 16:
        {after}
""" + WEIGHTS.replace("model.weight", "model[0].weight")
UNFREEZE = "model[0].requires_grad_(True)"


def weights(done: subprocess.CompletedProcess[str]) -> str:
    """Assert that both ranks have the same, to the last bit; return them."""
    told_nothing(done)
    found = {line for line in done.stdout.splitlines() if line.startswith("weights")}
    assert len(found) == 1, done.stdout
    return found.pop()


def numbers(line: str) -> list[float]:
    return [float(number) for number in line.partition("[")[2].strip("]").split(",")]


def microbatches(run: Program, trains: bool = False, **words: str) -> str:
    body = MICROBATCHES.format(
        **{"more": "", "unfreeze": "pass", "after": "pass", "before": ""} | words
    )
    return weights(run(body, PARTS.format(trains=trains)))


@pytest.mark.parametrize("net", ["model", "s.ddp(model)"])
@pytest.mark.parametrize("more", ["", ", same_bits=True"])
def test_what_is_unfrozen_in_a_step_trains_on_all_ranks_alike(
    run: Program, net: str, more: str
) -> None:
    """Each rank trained it by gradients of its own in that step; a wrapper that was made anew
    averaged what the tree adds up."""
    found = microbatches(run, net=net, more=more, unfreeze=f"{UNFREEZE}; net = {net}")
    right = microbatches(run, net="model", more=", same_bits=True", unfreeze=UNFREEZE)
    assert numbers(found) == pytest.approx(numbers(right), abs=0 if more else 1e-6)


@pytest.mark.parametrize("net", ["model", "s.ddp(model)"])
def test_what_is_frozen_after_a_step_stays_as_it_is(run: Program, net: str) -> None:
    """Its gradient of that step was applied in each of the next ones."""
    freeze = "model[0].requires_grad_(False); say('frozen', model[0].weight.sum().item())"
    after = f"{freeze}; net = {net}"
    words = {"more": "", "unfreeze": "pass", "after": after, "before": "", "net": net}
    last = "\nsay('frozen', model[0].weight.sum().item())"
    done = run(MICROBATCHES.format(**words) + last, PARTS.format(trains=True))
    told_nothing(done)
    assert len({line for line in done.stdout.splitlines() if line.startswith("frozen")}) == 1


@pytest.mark.parametrize("net", ["model", "s.ddp(model)"])
def test_what_is_unfrozen_between_two_microbatches_is_refused(run: Program, net: str) -> None:
    before = f"step.number == 9 or {UNFREEZE}"
    done = run(
        MICROBATCHES.format(net=net, more="", unfreeze="pass", after="pass", before=before),
        PARTS.format(trains=False),
    )
    refused(done, "unfrozen within the loop over the microbatches")


@pytest.mark.parametrize("more", ["", ", same_bits=True"])
def test_a_backward_before_the_first_microbatch_is_refused(run: Program, more: str) -> None:
    """It was added as often as there are ranks."""
    unfreeze = "model[2].weight.square().sum().backward()"
    done = run(
        MICROBATCHES.format(net="model", more=more, unfreeze=unfreeze, after="pass", before=""),
        PARTS.format(trains=True),
    )
    refused(done, "before the first microbatch of a step")


LOADER = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = {wrapped}
for x, y in s.loader(DATA, global_batch=8, steps=6, epochs=None):
    if s.step == 2:
        {unfreeze}
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
""" + WEIGHTS.replace("model.weight", "model[0].weight")


@pytest.mark.parametrize("wrapped", ["s.ddp(model)", "nn.parallel.DistributedDataParallel(model)"])
def test_what_is_unfrozen_and_not_wrapped_anew_is_refused(run: Program, wrapped: str) -> None:
    """DDP exchanges what trained when it was made: the replicas grew apart without a word."""
    body = LOADER.format(wrapped=wrapped, unfreeze=UNFREEZE)
    done = run(body, PARTS.format(trains=False))
    refused(done, "unfrozen after they were wrapped (0.bias, 0.weight)")
    assert "net = s.ddp(model)" in done.stderr


def test_what_is_unfrozen_and_wrapped_anew_is_told_nothing(run: Program) -> None:
    unfreeze = f"{UNFREEZE}; net = s.ddp(model)"
    weights(
        run(LOADER.format(wrapped="s.ddp(model)", unfreeze=unfreeze), PARTS.format(trains=False))
    )


def test_what_is_frozen_and_wrapped_anew_has_no_hook_of_the_programs(run: Program) -> None:
    """The watch over what is frozen is made anew after a fault, as the wrapper is."""
    body = LOADER.format(
        wrapped="s.ddp(model)",
        unfreeze="model[0].requires_grad_(False); net = s.ddp(model)",
    )
    done = run(
        body.replace("s.step == 2", "s.step >= 2 and model[0].weight.requires_grad"),
        PARTS.format(trains=True),
        inject="exception:rank=1,step=4",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "generation 2" in done.stderr
    assert "hooks" not in done.stderr, done.stderr[-4000:]
