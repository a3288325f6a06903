"""Programs that take samples otherwise than a training can repeat: each is refused, or told of
within two steps, without waiting for a fault."""

from __future__ import annotations

import pytest
from naive import USUAL, Program, refused, told_nothing, warned

pytestmark = pytest.mark.training
pytest.importorskip("torch", reason="torch is not installed")


def test_a_dataloader_that_nothing_splits_is_refused(run: Program) -> None:
    body = USUAL.replace("s.loader(DATA,", "s.loader(DataLoader(DATA, 4, shuffle=True),")
    done = run(body)
    refused(done, "this DataLoader does not split by rank")


def test_a_dataloader_for_microbatches_is_refused_for_its_batches(run: Program) -> None:
    """The advice was to leave out its sampler, and give s.loader what is left."""
    body = USUAL.replace(
        "for x, y in s.loader(DATA, global_batch=8, steps=",
        "for x, y in s.microbatches(DataLoader(DATA, 4), net, size=2, count=4, steps=",
    )
    assert body != USUAL
    refused(run(body), "give the dataset itself, not a DataLoader")


def test_a_dataloader_with_a_distributed_sampler_keeps_its_split(run: Program) -> None:
    sampler = "torch.utils.data.DistributedSampler(DATA, s.world, s.rank)"
    body = USUAL.replace("s.loader(DATA,", f"s.loader(DataLoader(DATA, 4, sampler={sampler}),")
    done = run(body)
    told_nothing(done)


@pytest.mark.parametrize("alike", [True, False])
def test_weights_are_the_same_on_all_ranks_or_told(run: Program, alike: bool) -> None:
    weights = f"torch.arange(64) + 1 + {0 if alike else 's.rank'}"
    done = run(USUAL.replace("global_batch=8,", f"global_batch=8, weights={weights},"))
    if alike:
        told_nothing(done)
    else:
        warned(done, "or has other weights: some come twice, and others never")


@pytest.mark.parametrize("fault", ["exception", "kill"])
def test_weights_that_follow_from_the_model_are_told_after_a_fault(
    run: Program, fault: str
) -> None:
    """The first ones were kept without a word; a replaced rank's ended the training by a number."""
    weights = "(model(X).detach() - X.sum(1, keepdim=True)).abs().flatten()"
    body = USUAL.replace("global_batch=8,", f"global_batch=8, weights={weights},")
    done = run(body, inject=f"{fault}:rank=1,step=2")
    if fault == "exception":
        warned(done, "made another dataset than when it was entered first")
    else:
        refused(done, "weights= are others than before")


def test_weights_with_a_gradient_are_refused_at_once(run: Program) -> None:
    weights = "model(X).abs().flatten()"
    done = run(USUAL.replace("global_batch=8,", f"global_batch=8, weights={weights},"))
    refused(done, "weights= takes one number for each sample: Can't call numpy()")


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


EPOCHS = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
for epoch in range({first}, 3):
    for x, y in s.loader(DATA, global_batch=32, epochs=1, name=f"epoch {{epoch}}"):
        nn.functional.mse_loss(net(x), y).backward()
        with s.update():
            opt.step()
            opt.zero_grad()
"""


def test_loaders_of_epochs_that_a_replaced_rank_has_not_got_are_told_nothing(run: Program) -> None:
    """It was told that the dataset was split by rank."""
    done = run(EPOCHS.format(first="s.step // 2"), inject="kill:rank=1,step=3")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "dataset" not in done.stderr, done.stderr[-4000:]
    assert done.stdout.count("ends at 6") == 2, done.stdout


def test_a_global_batch_that_follows_the_world_is_kept_and_told(run: Program) -> None:
    """A replaced rank made a loader for the smaller world, and ended the training."""
    body = USUAL.replace("steps=4", "steps=8")
    body = body.replace("global_batch=8", "global_batch=12 if s.generation == 1 else 8")
    done = run(body, inject="kill:rank=1,step=3")
    assert done.stderr.count("global_batch is 8 in this world, and was 12") == 1, done.stderr
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("ends at 8") == 2, done.stdout


SCHEDULE = "opt.param_groups[0]['lr'] *= 0.5"
BETWEEN = "an update between two loops over s.loader"


def test_an_update_after_each_epoch_is_told(run: Program) -> None:
    """As the advice for a schedule that steps outside of updates was read. After a fault it was
    made once more for each epoch that was done, without a word."""
    body = EPOCHS.format(first="0") + f"    with s.update():\n        {SCHEDULE}\n"
    warned(run(body), BETWEEN)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        (f"    if s.step == 3 * epoch + 2:\n        with s.update():\n            {SCHEDULE}\n", 9),
        ("", 6),
    ],
    ids=["by the step", "in the last batch's update"],
)
def test_an_update_of_an_epoch_that_knows_its_step_is_told_nothing(
    run: Program, where: str, told: int
) -> None:
    body = EPOCHS.format(first="0") + where
    if not where:
        body = body.replace(
            "opt.zero_grad()", f"opt.zero_grad()\n            if s.step % 2: {SCHEDULE}"
        )
    done = run(body, inject="kill:rank=1,step=5")
    assert done.returncode == 0, done.stderr[-4000:]
    assert BETWEEN not in done.stderr, done.stderr[-4000:]
    assert done.stdout.count(f"ends at {told}") == 2, done.stdout


OWN_DATA = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
split = torch.utils.data.DistributedSampler(DATA, s.world, s.rank)
{first}
for x, y in {batches}:
    nn.functional.mse_loss(net(x), y).backward()
    with s.update():
        opt.step()
        opt.zero_grad()
    if s.step % 2 == 0:
        say("step", s.step)
"""
OWN_LOADER = "DataLoader(DATA, 4, sampler=split)"


@pytest.mark.parametrize("asks", ["in a log", "for its rate"])
def test_a_dataloader_in_a_loop_that_asks_late_for_its_step_is_told(
    run: Program, asks: str
) -> None:
    """It began anew after a fault. That the loop had asked, if only for a log, kept it quiet."""
    body = OWN_DATA.format(first="", batches=OWN_LOADER)
    if asks == "for its rate":
        body = body.replace("    nn.", "    rate = 0.01 / (1 + s.step)\n    nn.")
    warned(run(body), "takes its batches from a DataLoader of its own, and has asked")


@pytest.mark.parametrize(
    ("first", "batches"),
    [
        ("from itertools import islice", f"islice({OWN_LOADER}, s.step, None)"),
        (f"it = iter({OWN_LOADER})\nfor _ in range(s.step): next(it)", "it"),
        (f"it = next(iter({OWN_LOADER}))", "[it, it, it, it][s.step:]"),
    ],
    ids=["islice", "batches left out", "one batch looked at"],
)
def test_a_dataloader_in_a_loop_that_goes_on_from_its_step_is_told_nothing(
    run: Program, first: str, batches: str
) -> None:
    told_nothing(run(OWN_DATA.format(first=first, batches=batches)))


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


MICROBATCHES = """
    for x, y in step:
        step.backward(nn.functional.mse_loss(net(x), y))
    with s.update():
        opt.step()
"""


@pytest.mark.parametrize(
    ("epochs", "inject", "words"),
    [
        ("None", "", "s.loader has no end here"),
        ("9", "exception:rank=1,step=3", "the function was entered at step 3, and has ended"),
    ],
    ids=["without end", "with an end"],
)
def test_a_count_around_microbatches_is_told(
    run: Program, epochs: str, inject: str, words: str
) -> None:
    source = f"s.microbatches(DATA, net, size=4, count=2, epochs={epochs})"
    loop = f"for n, step in enumerate({source}):\n    if n == 8: break{MICROBATCHES}"
    warned(run(USUAL[: USUAL.index("for x")] + loop, inject=inject), words)


@pytest.mark.parametrize("asks", ["step.consumed", "step.span.first", "s.step"])
def test_microbatches_in_a_loop_that_asks_for_its_place_are_told_nothing(
    run: Program, asks: str
) -> None:
    source = "s.microbatches(DATA, net, size=4, count=2, epochs=None)"
    last = {"step.consumed": 64, "step.span.first": 16, "s.step": 8}[asks]
    loop = f"for step in {source}:\n    if {asks} >= {last}: break{MICROBATCHES}"
    told_nothing(run(USUAL[: USUAL.index("for x")] + loop))


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


PATIENCE = """
model, opt = s.once(build)
s.track(model=model, opt=opt{})
net = s.ddp(model)
while stop.left and stop.epoch < 4:
    for x, y in s.loader(DATA, global_batch=32, epochs=1, name=f"e{{stop.epoch}}"):
        nn.functional.mse_loss(net(x), y).backward()
        with s.update():
            opt.step()
            opt.zero_grad()
    stop.look(s.step)
"""
STOP = """
class Stop:
    def __init__(self):
        self.best, self.left, self.epoch = -1, 2, 0

    def look(self, score):
        self.left = 2 if score > self.best else self.left - 1
        self.best, self.epoch = max(score, self.best), self.epoch + 1

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)

"""


@pytest.mark.parametrize("tracked", [True, False])
def test_a_patience_that_begins_anew_is_told(run: Program, tracked: bool) -> None:
    """The epochs that were done give no batch after a fault: each looked like one without
    progress, and the training had ended early without a word."""
    made = "stop = s.once(Stop)\n" if tracked else "stop = Stop()\n"
    body = made + PATIENCE.format(", stop=stop" if tracked else "").lstrip()
    done = run(body, parts=STOP, inject="exception:rank=1,step=7")
    text = "and without loader 'e3', of which 1 of 2 batches were done"
    if tracked:
        assert done.stdout.count("ends at 8") == 2, done.stdout
        assert "without a step" not in done.stderr
    else:
        warned(done, text)
        assert done.stdout.count("ends at 7") == 2, done.stdout


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


DRAWING = """
import random
import numpy

class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        own = torch.Generator().manual_seed(index)
        x, y = DATA[index]
        return x + {noise}, y
"""


@pytest.mark.parametrize(
    ("noise", "whose"),
    [
        ("torch.randn(8)", "torch"),
        ("random.random()", "random"),
        ("float(numpy.random.rand())", "numpy"),
        ("torch.randn(8, generator=own)", ""),
    ],
)
@pytest.mark.parametrize("microbatches", [False, True])
def test_a_dataset_that_draws_the_processs_random_numbers_is_told(
    run: Program, noise: str, whose: str, microbatches: bool
) -> None:
    """Augmentation was another one after a fault, and dropout too; now and then ranks that had had
    no fault were told that they draw the same numbers since one."""
    body = USUAL.replace("DATA", "Noisy()").replace("steps=4", "steps=12")
    if microbatches:
        body = BY_MICROBATCHES
    done = run(body, DRAWING.format(noise=noise))
    if whose:
        warned(done, f"draws from the process's own random numbers ({whose})")
        assert "before the fault" not in done.stderr, done.stderr[-4000:]
    else:
        told_nothing(done)


BY_MICROBATCHES = """
model, opt = s.once(build)
s.track(model=model, opt=opt)
net = s.ddp(model)
for step in s.microbatches(Noisy(), net, size=2, count=4, steps=12, epochs=None):
    for x, y in step:
        step.backward(nn.functional.mse_loss(net(x), y))
    with s.update():
        opt.step()
"""


@pytest.mark.parametrize("argument", ["num_workers=2", "batch_size=4", "rank=0"])
def test_an_argument_that_s_loader_has_not_got_is_refused_at_once(
    run: Program, argument: str
) -> None:
    """Three times an error of a class that the program does not name."""
    done = run(USUAL.replace("global_batch=8", f"global_batch=8, {argument}"))
    refused(done, f"s.loader takes no {argument.partition('=')[0]}: ")
    assert "(as before)" not in done.stderr


CURRICULUM = """
class Curriculum(torch.utils.data.Dataset):
    def __init__(self):
        self.level = 0

    def __len__(self):
        return 512

    def __getitem__(self, index):
        return X[index % 64], X[index % 64].sum().view(1) * (1 + self.level)


CURRICULUM = Curriculum()
"""


@pytest.mark.parametrize("ahead", [True, False])
def test_a_dataset_that_the_loop_changes_is_told(run: Program, ahead: bool) -> None:
    """Its batches were read ten steps before: all were those of the first level."""
    body = USUAL.replace("DATA", "CURRICULUM").replace("steps=4", "steps=14")
    body += "    CURRICULUM.level = s.step // 2\n    say('level', y[0] / x[0].sum())\n"
    if ahead:
        warned(run(body, CURRICULUM), "level of the dataset (or of its collate_fn) changes")
    else:
        done = run(body.replace("epochs=None", "epochs=None, prefetch_length=0"), CURRICULUM)
        told_nothing(done)
        assert "level tensor([7." in done.stdout, done.stdout


def test_a_subset_of_a_range_that_differs_is_told(run: Program) -> None:
    """A list was told of; of a range, half of the samples never came."""
    part = "torch.utils.data.Subset(DATA, range(s.rank, 64, s.world))"
    done = run(USUAL.replace("s.loader(DATA,", f"s.loader({part},"))
    warned(done, "on rank 1 the dataset holds other samples than elsewhere")
