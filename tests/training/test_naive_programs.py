"""Programs that break a rule, as a user would write them: each is refused, or warned of within two
steps, without waiting for a fault."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent

import pytest
from warm_machine import WarmMachine

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")

Program = Callable[..., "subprocess.CompletedProcess[str]"]

PROGRAM = """\
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from slurm_resilience.training import Session, inject, resilient

torch.set_num_threads(1)


def say(*words):
    # In one piece: both ranks write to the same pipe.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())


X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def build():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def average(model, world):
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= world

{parts}
@resilient({options})
def train(s: Session):
{body}
    say(f"seat {{s.seat}} ends at {{s.step}}")


if __name__ == "__main__":
    train()
"""
USUAL = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
for x, y in s.loader(DATA, global_batch=8, steps=4, epochs=None):
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
"""


@pytest.fixture
def run(tmp_path: Path, warm_machine: WarmMachine) -> Program:
    """Runs a program on two ranks."""
    numbers = itertools.count()

    def go(
        body: str, parts: str = "", options: str = "", inject: str = ""
    ) -> subprocess.CompletedProcess[str]:
        (place := tmp_path / str(next(numbers))).mkdir()
        program = place / "train.py"
        body = indent(dedent(body).strip("\n"), " " * 4)
        program.write_text(PROGRAM.format(parts=dedent(parts), options=options, body=body))
        more = {"OMP_NUM_THREADS": "1", "TMPDIR": str(place), "SRES_INJECT": inject}
        words = ("--nproc-per-node=2", "--standby=0", str(program))
        return warm_machine.run(words, more, place)

    return go


def test_a_training_that_lacks_ranks_ends_when_its_patience_does(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM.format(parts="", options="shortage_patience=0.5", body="    pass"))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SRES_", "SLURM_"))}
    more = {"RANK": "0", "WORLD_SIZE": "2", "SRES_MEET": f"dir:{tmp_path}/meet"}
    more["SRES_ADDRESS"] = "127.0.0.1"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=clean | more,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    words = "for 0.5 s 1 of 2 ranks were there, and at least 2 are needed (min_world)"
    refused(done, words)


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """It ended with one line that has these words."""
    assert done.returncode == 76, done.stderr[-4000:]
    assert "ends at" not in done.stdout
    given_up = [line for line in done.stderr.splitlines() if "the training gave up:" in line]
    assert given_up and all(words in line for line in given_up), done.stderr[-4000:]


def told_nothing(done: subprocess.CompletedProcess[str]) -> None:
    """No line but the one on how the training began."""
    lines = [line for line in done.stderr.splitlines() if "sres" in line]
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(lines) == 1 and "fresh start" in lines[0], done.stderr[-4000:]


def warned(done: subprocess.CompletedProcess[str], words: str) -> None:
    """It went on to its end, and one line has these words."""
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at") == 2, done.stdout
    said = [line for line in done.stderr.splitlines() if words in line]
    assert len(said) == 1, done.stderr[-4000:]


def test_a_program_that_keeps_the_rules_is_told_nothing(run: Program) -> None:
    done = run(USUAL + "\nsay(sorted(s.compared.items()))\n")
    told_nothing(done)
    assert done.stdout.count("('equal', True)") == 2, done.stdout


def test_a_process_group_of_ones_own_is_refused(run: Program) -> None:
    """Torchrun's programs begin so. A replaced process waited in it for the others for 30 minutes,
    when the training was over."""
    here = """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    file = os.path.join(os.environ["TMPDIR"], "store")
    dist.init_process_group(
        "gloo", f"file://{file}", rank=int(os.environ["RANK"]), world_size=2
    )
    """
    refused(run(USUAL, parts=here), "leave out init_process_group")


# --- data ---------------------------------------------------------------------------------------


def test_a_dataloader_that_nothing_splits_is_refused(run: Program) -> None:
    body = USUAL.replace("s.loader(DATA,", "s.loader(DataLoader(DATA, 4, shuffle=True),")
    done = run(body)
    refused(done, "this DataLoader does not split by rank")


def test_a_dataloader_with_a_distributed_sampler_keeps_its_split(run: Program) -> None:
    sampler = "torch.utils.data.DistributedSampler(DATA, s.world, s.rank)"
    body = USUAL.replace("s.loader(DATA,", f"s.loader(DataLoader(DATA, 4, sampler={sampler}),")
    done = run(body)
    told_nothing(done)


def test_a_sampler_of_another_rank_is_refused(run: Program) -> None:
    sampler = "torch.utils.data.DistributedSampler(DATA, 2, 0)"
    body = USUAL.replace("s.loader(DATA,", f"s.loader(DataLoader(DATA, 4, sampler={sampler}),")
    refused(run(body), "gives the share of rank 0 of 2, and this is rank 1 of 2")


def test_a_list_of_batches_that_nothing_splits_is_told(run: Program) -> None:
    parts = """
    class Batches:
        def __iter__(self):
            return iter(DataLoader(DATA, 4))
    """
    body = USUAL.replace("s.loader(DATA,", "s.loader(Batches(),")
    warned(run(body, parts), "ranks 0, 1 were given the same batch")


STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        rank, world = {split}
        return iter([DATA[number] for number in range(rank, len(DATA), world)])
"""


def test_a_stream_that_is_split_by_rank_is_told(run: Program) -> None:
    split = 'int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])'
    body = USUAL.replace("s.loader(DATA,", "s.loader(Stream(),")
    done = run(body, STREAM.format(split=split))
    warned(done, "rank 1 read other samples from this stream")


def test_a_stream_that_is_whole_is_told_nothing(run: Program) -> None:
    body = USUAL.replace("s.loader(DATA,", "s.loader(Stream(),")
    done = run(body, STREAM.format(split="0, 1"))
    told_nothing(done)


@pytest.mark.parametrize(
    ("split", "words"), [("s.rank, s.world", ""), ("0, 1", "ranks 0, 1 were given the same batch")]
)
def test_a_dataloader_over_a_stream_is_taken(run: Program, split: str, words: str) -> None:
    """It has no length, and says so by an error."""
    body = f"stream = Stream(({split}))\n" + USUAL.strip()
    body = body.replace("s.loader(DATA,", "s.loader(DataLoader(stream, 4, num_workers=1),")
    parts = """
    class Stream(IterableDataset):
        def __init__(self, place):
            self.rank, self.world = place

        def __iter__(self):
            return iter([DATA[number] for number in range(self.rank, len(DATA), self.world)])
    """
    done = run(body, parts)
    if words:
        warned(done, words)
    else:
        told_nothing(done)


def test_a_dataset_that_is_split_by_rank_is_told(run: Program) -> None:
    body = "part = TensorDataset(X[: 63 + s.rank], X[: 63 + s.rank, :1])\n" + USUAL.strip()
    body = body.replace("s.loader(DATA,", "s.loader(part,")
    warned(run(body), "on rank 1 the dataset has another length than elsewhere")


@pytest.mark.parametrize(
    "made",
    [
        "torch.utils.data.random_split(DATA, [56, 8], torch.Generator().manual_seed(s.rank))[0]",
        "[DATA[n] for n in torch.randperm(64, generator=torch.Generator().manual_seed(s.rank))]",
        "Files(s.rank)",
    ],
    ids=["split at random", "shuffled", "files in the order of a directory"],
)
def test_a_dataset_that_holds_other_samples_is_told(run: Program, made: str) -> None:
    """Samples came twice, others never, and validation samples were trained on, without a word."""
    parts = """
    class Files(torch.utils.data.Dataset):
        def __init__(self, start):
            self.files = [f"/data/{(n + start) % 64}" for n in range(64)]
            self.read = [None] * 64

        def __len__(self):
            return 64

        def __getitem__(self, index):
            self.read[index] = DATA[int(self.files[index][6:])]
            return self.read[index]
    """
    body = f"part = {made}\n" + USUAL.strip().replace("s.loader(DATA,", "s.loader(part,")
    warned(run(body, parts), "on rank 1 the dataset holds other samples than elsewhere")


def test_a_dataset_that_keeps_what_it_has_read_is_told_nothing(run: Program) -> None:
    """A replaced rank has read nothing yet."""
    parts = """
    class Kept(torch.utils.data.Dataset):
        def __init__(self):
            self.read = [None] * 64

        def __len__(self):
            return 64

        def __getitem__(self, index):
            self.read[index] = DATA[index]
            return self.read[index]

    KEPT = Kept()
    """
    body = USUAL.replace("s.loader(DATA,", "s.loader(KEPT,").replace("steps=4", "steps=8")
    done = run(body, parts, inject="kill:rank=1,step=3")
    assert done.returncode == 0 and "dataset" not in done.stderr, done.stderr[-4000:]


def test_a_split_that_is_made_anew_after_a_fault_is_told(run: Program) -> None:
    """Its validation part held samples that had been trained on."""
    split = "part, held_out = torch.utils.data.random_split(DATA, [56, 8])\n"
    body = USUAL.replace("for x, y", f"{split}for x, y").replace("s.loader(DATA,", "s.loader(part,")
    done = run(body.replace("steps=4", "steps=8"), inject="exception:rank=1,step=5")
    warned(done, "the function has made another dataset than when it was entered first")


# --- the state ----------------------------------------------------------------------------------


def test_a_swallowed_error_of_a_collective_is_not_committed(run: Program) -> None:
    """Seat 1 dies before its gradients are exchanged; seat 0 logs the error and goes on."""
    body = """
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    for x, y in s.loader(DATA, global_batch=8, steps=6, epochs=None):
        swallowed = False
        try:
            nn.functional.mse_loss(net(x), y).backward()
        except RuntimeError:
            swallowed = True
            say("swallowed")
        with s.update():
            if swallowed:
                say("committed")
            opt.step()
            opt.zero_grad()
    """
    done = run(body, inject="kill:rank=1,step=3")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "swallowed" in done.stdout
    assert "committed" not in done.stdout, done.stderr[-4000:]
    assert "step 3 is not committed" in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 6") == 2, done.stdout


@pytest.mark.parametrize("where", ["before its collectives", "after its collectives"])
def test_a_step_that_one_rank_alone_leaves_out_is_healed(run: Program, where: str) -> None:
    """An error that its loop catches: its replica was another one from then on, or its gradients
    were added to those of the batch before; and the ranks waited for each other at the end."""
    forward = "nn.functional.mse_loss(net(x), y).backward()"
    error = "if s.rank and s.step == 3 and failed == []: failed.append(1); raise MemoryError"
    lines = [error, forward] if where.startswith("before") else [forward, error]
    body = f"""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    net = s.ddp(model)
    failed = s.once(list)
    for x, y in s.loader(DATA, global_batch=8, steps=150, epochs=None):
        try:
            {lines[0]}
            {lines[1]}
        except MemoryError:
            opt.zero_grad()
            continue
        with s.update():
            opt.step()
            opt.zero_grad()
        time.sleep(0.01)
    """
    done = run(dedent(body) + WEIGHTS, "import time")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fault 1 in step" in done.stderr
    assert "seat 1 left out an update that seat 0 made" in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 150") == 2, done.stdout
    assert len({line for line in done.stdout.splitlines() if line.startswith("weights")}) == 1


def test_weights_that_are_loaded_after_track_are_told(run: Program) -> None:
    load = "model.load_state_dict({n: torch.zeros_like(v) for n, v in model.state_dict().items()})"
    body = USUAL.replace("net = s.ddp(model)", f"net = s.ddp(model)\n{load}")
    warned(run(body), "model.weight, model.bias changed between s.track and the first")


def test_frozen_weights_that_differ_are_refused(run: Program) -> None:
    parts = """
    def build():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))  # not seeded
        model[0].requires_grad_(False)
        return model, torch.optim.SGD(model[1].parameters(), 0.01)
    """
    done = run(USUAL, parts, options="trainable_only=True")
    refused(done, "frozen parameters differ: rank 1 from rank 0 in model.0.weight, model.0.bias")


FREEZING = """
def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.mark.parametrize("sign", ["==", ">="])
def test_a_newcomer_trains_the_parameters_that_its_peer_trains(run: Program, sign: str) -> None:
    """Ranks unfroze a layer in one step, and then one of them was replaced: its layer was frozen,
    and the training ended."""
    body = f"""
    model, opt = s.once(build)
    s.track(model=model, opt=opt)
    if s.step {sign} 3:
        model[0].requires_grad_(True)
    net = s.ddp(model)
    for x, y in s.loader(DATA, global_batch=8, steps=8, epochs=None):
        if s.step == 3 and not model[0].weight.requires_grad:
            model[0].requires_grad_(True)
            net = s.ddp(model)
        nn.functional.mse_loss(net(x), y).backward()
        with s.update():
            opt.step()
            opt.zero_grad()
    """
    done = run(body, FREEZING, inject="kill:rank=1,step=5")
    assert done.returncode == 0 and done.stdout.count("ends at 8") == 2, done.stderr[-4000:]


def test_ranks_that_train_other_parameters_are_refused(run: Program) -> None:
    """gloo aborted the processes."""
    body = USUAL.replace("net =", "model[0].requires_grad_(s.rank == 1)\nnet =")
    words = "s.ddp: requires_grad differs: rank 1 from rank 0 in 0.weight, 0.bias"
    refused(run(body, FREEZING), words)


def test_a_wrapper_of_an_earlier_world_is_refused(run: Program) -> None:
    """It exchanged no gradients, and the newcomer waited for them without a word."""
    body = USUAL.replace("net = s.ddp(model)", "net = s.once(lambda: s.ddp(model))")
    body = body.replace("steps=4", "steps=8")
    done = run(body, inject="kill:rank=1,step=5")
    refused(done, "call s.ddp(model) anew whenever the function is entered")


def test_a_plain_wrapper_of_an_earlier_world_is_refused(run: Program) -> None:
    """torch's own, made once: the newcomer made its own, and waited for the others."""
    body = USUAL.replace("s.ddp(model)", "s.once(nn.parallel.DistributedDataParallel, model)")
    body = body.replace("steps=4", "steps=8")
    done = run(body, inject="kill:rank=1,step=5")
    refused(done, "call s.ddp(model) anew whenever the function is entered")


def test_a_plain_wrapper_that_is_made_anew_is_healed(run: Program) -> None:
    body = USUAL.replace("s.ddp(model)", "nn.parallel.DistributedDataParallel(model)")
    done = run(body.replace("steps=4", "steps=8"), inject="kill:rank=1,step=5")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout


def test_a_wrapper_may_be_used_after_the_training(run: Program) -> None:
    body = USUAL + "\nglobal left\nleft = net\n"
    parts = "import atexit\natexit.register(lambda: say('after', tuple(left(X).shape)))\n"
    done = run(body, parts)
    assert done.stdout.count("after (64, 1)") == 2, done.stderr[-4000:]


def test_a_schedule_that_steps_after_the_update_is_told(run: Program) -> None:
    parts = """
    def build_all():
        model, opt = build()
        return model, opt, torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    """
    body = USUAL.replace("model, opt = s.once(build)", "model, opt, schedule = s.once(build_all)")
    body = body.replace("opt=opt)", "opt=opt, schedule=schedule)") + "    schedule.step()\n"
    once = body.replace("    schedule.step()", "    if s.step == 2: schedule.step()")
    for done in (run(body, parts), run(once, parts)):
        warned(done, "schedule steps outside of s.update()")
        assert "a learning rate is set" not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize(
    "update",
    ["s.update()\n    opt.step()", "opt.step()\n    with s.update():\n        pass"],
    ids=["without with", "before it"],
)
def test_an_optimizer_that_steps_outside_is_told(run: Program, update: str) -> None:
    """Without any update it was told after a hundred batches; else in words on loaded weights."""
    steps = "    with s.update():\n        opt.step()\n        opt.zero_grad()"
    done = run(USUAL.replace(steps, f"    {update}\n    opt.zero_grad()"))
    warned(done, "an optimizer steps outside of s.update()")
    assert "changed between" not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize("when", ["s.step % 4 == 3", "s.step % 4 == 0"])
def test_gradients_that_are_added_up_over_updates_are_told(run: Program, when: str) -> None:
    """After a fault the step was made with the gradients of some of its batches."""
    step = f"        if {when}:\n            opt.step()\n            opt.zero_grad()\n"
    body = USUAL.replace("        opt.step()\n        opt.zero_grad()\n", step)
    warned(run(body), "its gradients were kept for the next one")


@pytest.mark.parametrize("where", ["at its end", "before each batch"])
def test_an_update_that_skips_its_step_is_told_nothing(run: Program, where: str) -> None:
    body = USUAL.replace("opt.step()", "s.step < 1 or opt.step()")
    if where == "before each batch":
        body = body.replace("        opt.zero_grad()\n", "")
        body = body.replace("    nn.functional", "    opt.zero_grad()\n    nn.functional")
    told_nothing(run(body))


@pytest.mark.parametrize("place", ["before a batch's forward", "after track"])
def test_a_learning_rate_that_is_set_outside_is_told(run: Program, place: str) -> None:
    """One that was halved before a fault was halved once more after it."""
    by_hand = "for group in opt.param_groups: group['lr'] *= 0.5\n"
    if place == "after track":
        body = USUAL.replace("net = s.ddp", f"{by_hand}net = s.ddp")
    else:
        body = USUAL.replace(
            "    nn.functional", f"    if s.step == 3:\n        {by_hand}    nn.functional"
        )
    warned(run(body), "a learning rate is set outside of s.update()")


RATE = "for group in opt.param_groups: group['lr'] {}\n"


@pytest.mark.parametrize(
    "rate",
    ["= 0.01 / (1 + s.step)", "= 0.01 if s.step < 6 else 0.001"],
    ids=["another in each step", "the same for some steps"],
)
def test_a_learning_rate_that_is_set_in_each_step_is_told_nothing(run: Program, rate: str) -> None:
    """A step that is repeated sets it again."""
    body = USUAL.replace("steps=4", "steps=10").replace(
        "    nn.functional", f"    {RATE.format(rate)}    nn.functional"
    )
    told_nothing(run(body))
    done = run(body, inject="exception:rank=1,step=3,phase=backward")
    assert done.returncode == 0 and "learning rate" not in done.stderr, done.stderr[-4000:]


@pytest.mark.parametrize("rate", ["*= 0.9", "= 0.01 * 0.9 ** count; count += 1"])
def test_a_learning_rate_that_a_repeated_step_sets_otherwise_is_told(
    run: Program, rate: str
) -> None:
    body = USUAL.replace("steps=4", "steps=8").replace(
        "    nn.functional", f"    {RATE.format(rate)}    nn.functional"
    )
    body = body.replace("net = s.ddp", "count = 0\nnet = s.ddp")
    done = run(body, inject="exception:rank=1,step=3,phase=backward")
    warned(done, "a learning rate was set outside of s.update() in step 4, and to another number")


@pytest.mark.parametrize(
    ("made", "steps"),
    [("schedule = s.once(Warmup, opt)", "schedule.step()"), ("count = 0", "count += 1")],
    ids=["an object", "a local variable"],
)
@pytest.mark.parametrize("where", ["in the update", "before it"])
def test_a_learning_rate_that_counts_by_itself_is_told(
    run: Program, made: str, steps: str, where: str
) -> None:
    """It began anew after a fault: on all ranks, where no comparison tells, or on one of them."""
    parts = """
    class Warmup:
        def __init__(self, opt):
            self.opt, self.count = opt, 0

        def step(self):
            self.count += 1
            for group in self.opt.param_groups: group["lr"] = 0.001 * self.count
    """
    if made == "count = 0":
        steps += "; opt.param_groups[0]['lr'] = 0.001 * count"
    place = "        opt.step()" if where == "in the update" else "    with s.update"
    indented = " " * (len(place) - len(place.lstrip())) + steps
    body = USUAL.replace("net = s.ddp", f"{made}\nnet = s.ddp")
    body = body.replace(place, f"{indented}\n{place}")
    warned(run(body, parts), "neither s.step nor anything that is tracked says how far it is")


@pytest.mark.parametrize("rate", ["*= 0.9", "= (0.01, 0.01, 0.001, 0.001)[s.step]"])
def test_a_learning_rate_that_follows_from_the_state_is_told_nothing(
    run: Program, rate: str
) -> None:
    told_nothing(run(USUAL + f"        {RATE.format(rate)}"))


SEEDING = "torch.manual_seed({})\nnet = s.ddp"


@pytest.mark.parametrize("seed", ["s.rank", "1234 + s.rank"])
def test_a_seed_after_track_is_told(run: Program, seed: str) -> None:
    """The masks of the first steps came again after each fault. Rank 0 has the seed of before."""
    body = USUAL.replace("net = s.ddp", SEEDING.format(seed))
    warned(run(body), "torch was seeded anew after s.track")


def test_a_seed_before_track_or_by_the_step_is_told_nothing(run: Program) -> None:
    body = USUAL.replace("net = s.ddp", SEEDING.format("s.rank + 1000 * s.step"))
    body = body.replace("s.track", "torch.manual_seed(s.rank)\ns.track")
    told_nothing(run(body))


def test_a_learning_rate_that_is_set_inside_is_told_nothing(run: Program) -> None:
    by_hand = "for group in opt.param_groups: group['lr'] = 0.01 / (1 + s.step)\n"
    told_nothing(run(USUAL.replace("        opt.step()", f"        {by_hand}        opt.step()")))


PARTS_UNUSED = """
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.calls = nn.Linear(8, 1), nn.Linear(8, 1), []

    def forward(self, x):
        self.calls.append(1)
        return self.used(x) if {unused} else self.used(x) + self.unused(x)

def build():
    torch.manual_seed(0)
    model = Two()
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.mark.parametrize("wrapped", ["s.ddp(model)", "nn.parallel.DistributedDataParallel(model)"])
@pytest.mark.parametrize("unused", ["True", "dist.get_rank() == 1 and len(self.calls) == 3"])
def test_gradients_that_ddp_has_not_exchanged_are_refused(
    run: Program, wrapped: str, unused: str
) -> None:
    """torch says so at the next forward. That was taken for a fault, and repeated: in each step the
    replicas were changed by gradients of their own, and the training ended with success."""
    done = run(USUAL.replace("s.ddp(model)", wrapped), PARTS_UNUSED.format(unused=unused))
    refused(done, "were not exchanged between the ranks")
    assert "unused.weight, unused.bias" in done.stderr


def test_parameters_without_a_use_that_ddp_is_told_of_are_taken(run: Program) -> None:
    more = "s.ddp(model, find_unused_parameters=True)"
    told_nothing(run(USUAL.replace("s.ddp(model)", more), PARTS_UNUSED.format(unused="True")))


COUNTING = """
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.cached = nn.Linear(8, 1), torch.zeros(1)
        {made}

    def forward(self, x):
        {counts}
        self.cached = x.detach().mean(0)
        return self.line(x) * {used}

def build():
    torch.manual_seed(0)
    model = Counting()
    return model, torch.optim.SGD(model.parameters(), 0.01)
"""


@pytest.mark.parametrize(
    ("made", "counts", "used", "told"),
    [
        ("self.warm = 0", "self.warm += 1", "(1 + self.warm)", "model.warm counts in each step"),
        ("self.mean = torch.ones(1)", "self.mean.mul_(0.9)", "self.mean", "model.mean counts in"),
        ("self.register_buffer('warm', torch.zeros(()))", "self.warm += 1", "(1 + self.warm)", ""),
    ],
    ids=["a number", "a tensor", "a buffer"],
)
def test_state_in_a_modules_attributes_is_told(
    run: Program, made: str, counts: str, used: str, told: str
) -> None:
    """A repeated step counted twice, and a replaced rank computed with another number."""
    done = run(USUAL, COUNTING.format(made=made, counts=counts, used=used))
    if told:
        warned(done, told)
        warned(done, "harmless where only a log reads it")
    else:
        told_nothing(done)


def test_buffers_of_a_loss_that_is_not_tracked_are_told(run: Program) -> None:
    """A running centre was changed twice by a step that was repeated, and was not healed."""
    parts = """
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(1))

        def forward(self, y):
            self.centre = self.centre * 0.9 + y.detach().mean() * 0.1
            return (y - self.centre).square().mean()
    """
    body = USUAL.replace("s.track", "loss = s.once(Centred)\ns.track")
    body = body.replace("nn.functional.mse_loss(net(x), y)", "loss(net(x))")
    warned(run(body, parts), "Centred.centre changes in each step, and its module is not tracked")


@pytest.mark.parametrize("removed", [False, True])
def test_hooks_that_come_once_more_after_a_fault_are_told(run: Program, removed: bool) -> None:
    """One that halves a gradient had it halved twice."""
    body = USUAL.replace("net =", "hook = model.weight.register_hook(lambda grad: grad / 2)\nnet =")
    if removed:
        head, loop = body.split("for x, y", 1)
        body = (
            head + "try:\n" + indent("for x, y" + loop, " " * 4) + "finally:\n    hook.remove()\n"
        )
    done = run(body, inject="exception:rank=0,step=2,phase=backward")
    if removed:
        assert done.returncode == 0 and "hooks on" not in done.stderr, done.stderr
    else:
        warned(done, "hooks on the model are registered anew whenever the function is called")


GENERATORS = {
    "torch": ("torch.Generator().manual_seed(0)", "torch.randn(x.shape, generator=noise)"),
    "numpy": (
        "__import__('numpy').random.default_rng(0)",
        "torch.from_numpy(noise.standard_normal(tuple(x.shape))).float()",
    ),
    "old numpy": (
        "__import__('numpy').random.RandomState(0)",
        "torch.from_numpy(noise.standard_normal(tuple(x.shape))).float()",
    ),
    "python": ("__import__('random').Random(0)", "noise.random()"),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_generator_of_the_programs_own_is_healed(run: Program, kind: str) -> None:
    """It could not be tracked. A repeated step drew other numbers, and a replaced rank the first
    ones again."""
    made, draw = GENERATORS[kind]
    body = USUAL.replace("s.track(", f"noise = s.once(lambda: {made})\ns.track(noise=noise, ")
    body = body.replace("net(x)", f"net(x + 0.1 * {draw})").replace("steps=4", "steps=8") + WEIGHTS
    ends = []
    for fault in ("", "kill:rank=1,step=3,phase=update", "exception:rank=1,step=5,phase=backward"):
        done = run(body, inject=fault)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "changed between" not in done.stderr and "drawn from" not in done.stderr
        ends.append({line for line in done.stdout.splitlines() if line.startswith("weights")})
    assert ends[0] == ends[1] == ends[2] and len(ends[0]) == 1


@pytest.mark.parametrize("kind", ["torch", "numpy", "old numpy"])
def test_a_generator_that_is_not_tracked_is_told(run: Program, kind: str) -> None:
    made, draw = GENERATORS[kind]
    body = USUAL.replace("s.track(", f"noise = s.once(lambda: {made})\ns.track(")
    warned(run(body.replace("net(x)", f"net(x + 0.1 * {draw})")), "is drawn from and not tracked")


MICROBATCHES = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = {net}
for step in s.microbatches(DATA, net, size=2, count=4, steps=4, epochs=None):
    for x, y in step:
        {before}
        step.backward(nn.functional.mse_loss(net(x), y))
        {after}
    with s.update():
        opt.step()
"""


@pytest.mark.parametrize("net", ["s.ddp(model)", "model"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("opt.zero_grad()", ""),
        ("", "nn.utils.clip_grad_norm_(model.parameters(), 1e-3)"),
        ("model.weight.square().sum().backward()", ""),
    ],
    ids=["zero_grad", "clipping", "another backward"],
)
def test_gradients_that_change_between_microbatches_are_refused(
    run: Program, net: str, before: str, after: str
) -> None:
    """A step was made with the last microbatch alone, without a word."""
    done = run(MICROBATCHES.format(net=net, before=before, after=after))
    refused(done, "the gradients were changed between two microbatches of a step")


@pytest.mark.parametrize("net", ["s.ddp(model, gradient_as_bucket_view=True)", "model"])
def test_microbatches_without_a_change_are_told_nothing(run: Program, net: str) -> None:
    told_nothing(run(MICROBATCHES.format(net=net, before="", after="")))


SLOW = """
class Lookahead(torch.optim.Optimizer):
    '''Keeps slow weights beside what torch's optimizers keep.'''

    def __init__(self, inner):
        self.inner, self.slow, self.count = inner, None, 0
        super().__init__(inner.param_groups, {{}})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        self.inner.step()
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.slow is None:
            self.slow = [p.detach().clone() for p in parameters]
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                for slow, p in zip(self.slow, parameters):
                    slow.add_(p - slow, alpha=0.5)
                    p.copy_(slow)
{own}

def build():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    return model, Lookahead(torch.optim.SGD(model.parameters(), 0.01, momentum=0.9))
"""
OWN = """
    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, values):
        self.inner.load_state_dict(values["inner"])
        self.slow, self.count = values["slow"], values["count"]
"""
WEIGHTS = '\nsay("weights", [round(v, 9) for v in model.weight.flatten().tolist()])\n'


def test_an_optimizers_own_state_is_healed(run: Program) -> None:
    parts = SLOW.format(own=OWN)
    body = USUAL.replace("steps=4", "steps=8") + WEIGHTS
    ends = []
    for fault in ("", "kill:rank=1,step=3,phase=update"):
        done = run(body, parts, inject=fault)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "replicas differ" not in done.stderr
        ends.append({line for line in done.stdout.splitlines() if line.startswith("weights")})
    assert ends[0] == ends[1] and len(ends[0]) == 1


def test_state_that_an_optimizer_hides_is_told(run: Program) -> None:
    done = run(USUAL, SLOW.format(own=""))
    warned(done, "opt keeps state where no peer finds it (inner, slow)")


def test_replicas_that_differ_one_step_after_a_healing_are_told(run: Program) -> None:
    """The optimizer's slow weights are in no state_dict, so the newcomer begins without them."""
    done = run(
        USUAL.replace("steps=4", "steps=8"),
        SLOW.format(own=""),
        inject="kill:rank=1,step=3,phase=update",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "replicas differ: rank 1 from rank 0 in model.weight" in done.stderr, done.stderr[-4000:]


def test_averaged_weights_that_are_swapped_in_are_told(run: Program) -> None:
    body = USUAL + "    for p in model.parameters():\n        p.data.copy_(p.data * 0.999)\n"
    warned(run(body), "model.weight, model.bias changed between two updates")


def test_weights_that_are_clipped_through_data_are_told(run: Program) -> None:
    body = USUAL + "    model.weight.data.clamp_(-0.01, 0.01)\n"
    warned(run(body), "model.weight changed between two updates")


def test_a_tracked_average_that_is_updated_outside_is_told(run: Program) -> None:
    body = USUAL.replace("opt=opt)", "opt=opt, average=average)").replace(
        "s.track", "average = s.once(torch.optim.swa_utils.AveragedModel, model)\ns.track", 1
    )
    body += "    average.update_parameters(model)\n"
    warned(run(body), "changed between two updates")


def test_an_object_of_ones_own_that_changes_outside_is_told(run: Program) -> None:
    parts = """
    class Curriculum:
        level = 0

        def state_dict(self):
            return {"level": self.level}

        def load_state_dict(self, values):
            self.level = values["level"]
    """
    body = USUAL.replace("opt=opt)", "opt=opt, curriculum=curriculum)").replace(
        "s.track", "curriculum = s.once(Curriculum)\ns.track", 1
    )
    body += "    curriculum.level += 1\n"
    warned(run(body, parts), "curriculum changed between two updates")


def test_an_optimizer_that_is_not_tracked_is_told(run: Program) -> None:
    warned(
        run(USUAL.replace(", opt=opt)", ")")), "trained by an optimizer that is not tracked (SGD)"
    )


@pytest.mark.parametrize(
    ("what", "use", "words"),
    [
        ("torch.optim.lr_scheduler.StepLR, opt, 2", "part.step()", "StepLR"),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau, opt", "part.step(1.0)", "ReduceLROnPlateau"),
        ("torch.optim.swa_utils.AveragedModel, model", "part.update_parameters(model)", "Averaged"),
        ("torch.amp.GradScaler, 'cpu'", "part.scale(x)", "GradScaler"),
    ],
    ids=["schedule", "plateau", "average", "scaler"],
)
@pytest.mark.parametrize("tracked", [False, True])
def test_what_goes_with_an_optimizer_and_is_not_tracked_is_told(
    run: Program, what: str, use: str, words: str, tracked: bool
) -> None:
    """It was told of one step after a rank had been replaced, which had begun with a new one."""
    body = USUAL.replace("s.track", f"part = s.once({what})\ns.track") + f"        {use}\n"
    if tracked:
        told_nothing(run(body.replace("opt=opt)", "opt=opt, part=part)")))
    else:
        done = run(body)
        warned(done, f"{words}")
        warned(done, "belongs to the training and is not tracked")


COPIES = {
    "list": ("[p.detach().clone() for p in model.parameters()]", "average"),
    "dict": ("{k: v.clone() for k, v in model.state_dict().items()}", "average.values()"),
    "module": ("__import__('copy').deepcopy(model)", "average.parameters()"),
}


@pytest.mark.parametrize("kind", COPIES)
def test_averages_in_a_copy_that_is_not_tracked_are_told(run: Program, kind: str) -> None:
    """They were not healed, and a replaced rank began with new ones without a word."""
    made, values = COPIES[kind]
    body = USUAL.replace("s.track", f"average = s.once(lambda: {made})\ns.track")
    body += "        with torch.no_grad():\n"
    body += f"            for one, now in zip({values}, model.parameters()):\n"
    body += "                one.lerp_(now, 0.1)\n"
    warned(
        run(body), "the parameters' shapes and nearly their values is written to and not tracked"
    )


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("once", [False, True])
def test_a_copy_that_the_function_makes_of_the_weights_is_told(
    run: Program, kind: str, once: bool
) -> None:
    """A reference was made anew after a fault, of weights that had been trained meanwhile."""
    made = f"s.once(lambda: {COPIES[kind][0]})" if once else COPIES[kind][0]
    body = USUAL.replace("net =", f"average = {made}\nnet =")
    warned(run(body), "a copy of the weights")


def test_a_copy_that_is_made_before_track_in_the_function_is_told_after_a_fault(
    run: Program,
) -> None:
    body = USUAL.replace("s.track", f"average = {COPIES['module'][0]}\ns.track")
    warned(run(body, inject="exception:rank=0,step=2,phase=backward"), "a copy of the weights")


def test_a_copy_that_is_made_where_the_model_is_built_is_not_told(run: Program) -> None:
    body = USUAL.replace("s.track", f"average = s.once(lambda: {COPIES['module'][0]})\ns.track")
    told_nothing(run(body))
    done = run(body, inject="exception:rank=0,step=2,phase=backward")
    assert done.returncode == 0 and "a copy of the weights" not in done.stderr, done.stderr


def test_what_was_built_before_the_call_and_is_not_tracked_is_told(run: Program) -> None:
    """Python's collector did not list it, and so it was not looked at."""
    parts = """
    MODEL, OPT = build()
    SCHEDULE = torch.optim.lr_scheduler.StepLR(OPT, 2)
    AVERAGE = __import__("copy").deepcopy(MODEL)
    """
    body = (
        USUAL.replace("s.once(build)", "MODEL, OPT")
        + """\
        SCHEDULE.step()
        with torch.no_grad():
            for one, now in zip(AVERAGE.parameters(), model.parameters()):
                one.lerp_(now, 0.1)
    """.replace("\n    ", "\n")
    )
    done = run(body, parts)
    warned(done, "StepLR belongs to the training and is not tracked")
    warned(done, "a Linear with the parameters' shapes and nearly their values is written to")


def test_copies_that_are_no_averages_are_not_told(run: Program) -> None:
    parts = """
    def more(model):
        begun = [p.detach().clone() for p in model.parameters()]
        return begun, [torch.zeros_like(p) for p in model.parameters()]
    """
    body = USUAL.replace("s.track", "begun, sums = s.once(more, model)\ns.track")
    body = body.replace(
        "    with s.update",
        "    for a, p in zip(sums, model.parameters()): a.add_(p.grad)\n    with s.update",
    )
    told_nothing(run(body + "        [one.zero_() for one in sums]\n", parts))


def test_a_schedule_made_of_several_is_tracked_as_a_whole(run: Program) -> None:
    parts = """
    def build_all():
        model, opt = build()
        rates = torch.optim.lr_scheduler
        two = [rates.ConstantLR(opt), rates.StepLR(opt, 2)]
        return model, opt, rates.SequentialLR(opt, two, [2])
    """
    body = USUAL.replace("model, opt = s.once(build)", "model, opt, part = s.once(build_all)")
    told_nothing(
        run(body.replace("opt=opt)", "opt=opt, part=part)") + "        part.step()\n", parts)
    )


def test_an_optimizer_of_what_is_not_tracked_is_told_nothing(run: Program) -> None:
    """A critic that is thrown away, say."""
    other = """
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
"""
    body = USUAL.replace("net = s.ddp(model)", "net = s.ddp(model)" + dedent(other).rstrip())
    told_nothing(run(body + "    other.step()\n"))


def test_parameters_that_the_optimizer_gets_later_are_told(run: Program) -> None:
    """A replaced rank is built without them: its state would not fit at the first fault."""
    more = "if s.step == 2:\n        opt.add_param_group({'params': [torch.zeros(1)]})"
    warned(run(USUAL + f"    {more}\n"), "opt was given parameters after s.track")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("model.extra = nn.Parameter(torch.zeros(1))", "model.extra came after s.track"),
        ("model.part = nn.Linear(2, 2)", "model.part.weight, model.part.bias came after s.track"),
    ],
)
def test_parameters_that_the_model_gets_later_are_told(run: Program, more: str, words: str) -> None:
    """The training ended at the first fault, with nothing said before."""
    warned(run(USUAL + f"    if s.step == 2:\n        {more}\n"), words)


def test_a_parameter_in_the_place_of_another_is_told_nothing(run: Program) -> None:
    more = "if s.step == 2:\n        model.bias = nn.Parameter(model.bias.detach().clone())\n"
    more += "        net = s.ddp(model)\n        opt.param_groups[0]['params'][1] = model.bias"
    done = run(USUAL + f"    {more}\n")
    assert "came after" not in done.stderr


def test_collectives_in_an_update_are_told(run: Program) -> None:
    body = USUAL.replace("    with s.update():", "    with s.update():\n        average(model, 1)")
    warned(run(body), "collectives inside of s.update()")


def test_one_rank_that_changes_its_weights_alone_is_told(run: Program) -> None:
    """By default every hundredth step is looked at; here it is every one."""
    body = USUAL.replace("steps=4", "steps=12").replace(
        "        opt.zero_grad()",
        "        opt.zero_grad()\n        if s.rank == 1 and s.step == 6:\n"
        "            model.bias.data[0] += 1e-3",
    )
    done = run(body, options="digest_every=1")
    warned(done, "step 7: replicas differ: rank 1 from rank 0 in model.bias")


AHEAD = """
def ahead(batches):
    ready, end = queue.Queue(2), object()

    def read():
        for batch in batches:
            ready.put(batch)
        ready.put(end)

    threading.Thread(target=read, daemon=True).start()
    return iter(ready.get, end)
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("list({})", "4 batches were read before their steps"),
        ("ahead({})", "s.loader is read in a thread of the program's own"),
    ],
)
def test_batches_that_are_read_before_their_steps_are_told(
    run: Program, how: str, words: str
) -> None:
    """A fault leaves out what was read and not used, and the training ends early, with success."""
    source = "s.loader(DATA, global_batch=8, steps=4, epochs=None)"
    body = USUAL.replace(source, how.format(source))
    warned(run(body, "import queue, threading\n" + AHEAD), words)


def test_batches_that_are_given_again_are_told(run: Program) -> None:
    """After a fault the loader had none left, and the training ended early, with success."""
    source = "s.loader(DATA, global_batch=8, steps=4, epochs=None)"
    body = USUAL.replace(source, f"itertools.islice(itertools.cycle({source}), 8)")
    warned(run(body, "import itertools"), "updates go on after the loop over s.loader")


COUNTS = {
    "next": "it = iter({})\nfor _ in range(8):\n    x, y = next(it)",
    "enumerate": "for n, (x, y) in enumerate({}):\n    if n == 8: break",
    "zip": "for _, (x, y) in zip(range(8), {}):",
}
LOOP = "for x, y in s.loader(DATA, global_batch=8, steps=4, epochs=None):"


@pytest.mark.parametrize("how", COUNTS)
def test_a_count_around_a_loader_without_end_is_told(run: Program, how: str) -> None:
    """It counts anew after each fault: 12 steps were made of 8, without a word."""
    loop = COUNTS[how].format("s.loader(DATA, global_batch=8, epochs=None)")
    warned(run(USUAL.replace(LOOP, loop)), "s.loader has no end here")


@pytest.mark.parametrize("how", COUNTS)
def test_a_count_that_has_made_more_steps_is_told(run: Program, how: str) -> None:
    loop = COUNTS[how].format("s.loader(DATA, global_batch=8, epochs=9)")
    body = USUAL.replace(LOOP, loop)
    told_nothing(run(body))
    done = run(body, inject="exception:rank=1,step=3")
    assert done.stdout.count("ends at 11") == 2, done.stdout
    warned(done, "the function was entered at step 3, and has ended before s.loader did")


@pytest.mark.parametrize(
    "loop",
    [
        "it = iter({})\nfor _ in range(s.step, 8):\n    x, y = next(it)",
        "it = iter({})\nfor _ in range(begun, 8):\n    x, y = next(it)",
        "for x, y in {}:\n    if s.step == 8: break",
    ],
    ids=["range", "as track returns it", "break"],
)
@pytest.mark.parametrize("epochs", ["None", "9"])
def test_a_loop_that_ends_by_the_step_is_told_nothing(run: Program, loop: str, epochs: str) -> None:
    loop = loop.format(f"s.loader(DATA, global_batch=8, epochs={epochs})")
    body = USUAL.replace(LOOP, loop)
    if "begun" in loop:
        body = body.replace("s.track", "begun = s.track")
    done = run(body, inject="exception:rank=1,step=3")
    assert done.stdout.count("ends at 8") == 2, done.stdout
    assert done.returncode == 0, done.stderr[-4000:]
    assert "s.loader has no end" not in done.stderr and "has ended before" not in done.stderr


def test_a_second_part_that_goes_on_from_the_step_is_told_nothing(run: Program) -> None:
    second = OWN_LOOP.format("s.step, 8").partition("net = s.ddp(model)\n")[2]
    told_nothing(run(USUAL + second))


def test_what_is_left_over_at_the_end_is_an_update_of_its_own(run: Program) -> None:
    body = USUAL + "with s.update():\n    opt.step()\n"
    told_nothing(run(body))


OWN_LOOP = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
for step in range({}):
    x, y = DATA[step * 8 + s.rank * 4 : step * 8 + s.rank * 4 + 4]
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
"""


def test_a_loop_that_begins_anew_after_a_fault_is_told(run: Program) -> None:
    """It made all its steps once more, and the training ended with more than were wanted."""
    warned(run(OWN_LOOP.format("4")), "takes its batches neither from s.loader nor by s.step")


@pytest.mark.parametrize(
    ("count", "tracked"),
    [("s.step, 4", "opt=opt"), ("place.step, 4", "opt=opt, place=place")],
    ids=["by the session's step", "by an object of its own"],
)
def test_a_loop_that_knows_its_place_is_told_nothing(
    run: Program, count: str, tracked: str
) -> None:
    parts = """
    class Place:
        step = 0

        def state_dict(self):
            return {"step": self.step}

        def load_state_dict(self, values):
            self.step = values["step"]

    place = Place()
    """
    body = OWN_LOOP.format(count).replace("opt=opt", tracked)
    told_nothing(run(body, parts))


@pytest.mark.parametrize(
    ("leaves", "words"),
    [
        ("sys.exit(0)", ""),
        ("raise ValueError('in the child')", "in the child"),
        ("return", "forked"),
    ],
)
def test_a_child_that_leaves_the_function_is_no_rank(run: Program, leaves: str, words: str) -> None:
    """It took the rank's entry out of the directory, and three errors stood in the log."""
    fork = f"""
    if s.step == 2:
        child = os.fork()
        if child == 0:
            {leaves}
        say("child", os.waitpid(child, 0)[1])
"""
    done = run(USUAL + fork, "import sys")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at 4") == 2, done.stdout
    assert done.stdout.count(f"child {256 if words else 0}\n") == 2, done.stdout
    assert words in done.stderr
    assert "takes no part in its training" not in done.stderr
    assert ("Traceback" in done.stderr) == ("raise" in leaves)


# --- torch's own settings -----------------------------------------------------------------------


def test_a_fault_in_a_validation_does_not_leave_gradients_off(run: Program) -> None:
    """Nor the dtype that it has set: ranks, and newcomers, may differ in torch's defaults."""
    validation = """
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        dist.barrier()
        if s.rank and s.step == 2 and s.attempt == 1:
            raise RuntimeError("in the validation")
        dist.barrier()
        torch.set_grad_enabled(True)
"""
    ends = set()
    for fault in ("", "kill:rank=1,step=5,phase=update"):
        body = USUAL.replace("steps=4", "steps=8") + indent(dedent(validation), " " * 4) + WEIGHTS
        done = run(body, inject=fault)
        assert done.returncode == 0, done.stderr[-4000:]
        assert done.stderr.count("in the validation") >= 1
        ends |= {line for line in done.stdout.splitlines() if line.startswith("weights")}
    assert len(ends) == 1


def test_torchs_default_device_is_the_programs_own(run: Program) -> None:
    """Tensors of our own went there too: where it is a GPU, no word of the mesh's groups came."""
    body = USUAL.replace("steps=4", "steps=8")
    parts = """
    def build():
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        torch.set_default_device("meta")
        return model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    """
    done = run(body, parts, inject="kill:rank=1,step=3", options="partner_every=2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fault 1" not in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout
