"""Every kind of data that a person may name, on engines; and every wrong one in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from equality import Case, assert_equal, on_engines, single_process
from interrupting import interrupted_after
from test_data import CELL, MODEL, samples_by_epoch

from fsdp_magic.errors import CellFailedError, CellInterrupted, EngineDiedError

KINDS = """
import os
import random
import datasets
import numpy
from torch.utils.data import BatchSampler, RandomSampler, default_collate

class Stream(IterableDataset):
    def __init__(self, length, draws=False):
        self.length, self.draws = length, draws

    def __iter__(self):
        order = list(range(self.length))
        if self.draws:
            random.shuffle(order)
        for i in order:
            yield torch.tensor([float(i)], dtype=torch.float64)

def rows(length):
    return datasets.Dataset.from_dict({"x": [[float(i)] for i in range(length)]})

def ready(numbers):
    return [torch.tensor([[float(i)]], dtype=torch.float64) for i in numbers]

class Ready:
    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(ready(self.numbers))
"""
ROWS_CELL = CELL.replace("batch", 'batch["x"].double()')
ALL = list(range(32))


@pytest.fixture
def prepared(session):
    session.model(MODEL, show=False)
    session.run(KINDS, show=False)
    return session


# -- equality with one process


@pytest.mark.parametrize(
    "data",
    [
        "Stream(data)",
        "DataLoader(Stream(data),batch_size=3)",
        "DataLoader(Stream(data),batch_size=3,num_workers=1)",
        "DataLoader(data,batch_size=2,num_workers=2)",
        "lambda:Stream(data)",
        "lambda:data",
    ],
)
def test_any_source_of_the_same_samples_trains_as_one_process(session, data):
    session.run(
        "from torch.utils.data import DataLoader, IterableDataset\n"
        "class Stream(IterableDataset):\n"
        "    def __init__(self, samples):\n        self.samples = samples\n"
        "    def __iter__(self):\n        return iter(self.samples)\n",
        show=False,
    )
    measured = on_engines(session, Case(), accumulate=2, data=data)
    assert_equal(measured, single_process(Case()), tolerance=1e-9)


# -- kinds


@pytest.mark.parametrize(
    "data",
    [
        "Stream(32)",
        "Stream(32, draws=True)",
        "DataLoader(Stream(32, draws=True), batch_size=4)",
        "DataLoader(Stream(32, draws=True), batch_size=4, num_workers=1)",
        "lambda: Stream(32, draws=True)",
    ],
)
def test_ranks_share_a_stream(prepared, data):
    prepared.run(f"data = {data}", show=False)
    run = prepared.train(CELL, data="data", epochs=2, micro_batch_size=4, show=False)
    assert (run.state, run.steps) == ("done", 8)
    for ranks in samples_by_epoch(prepared).values():
        assert sorted(ranks[0] + ranks[1]) == ALL


@pytest.mark.parametrize(
    "data",
    [
        "rows(32)",
        'rows(32).with_format("torch")',
        "DataLoader(rows(32), batch_size=4, shuffle=True)",
        'DataLoader(rows(32).with_format("torch"), batch_size=4, num_workers=1)',
        "rows(32).to_iterable_dataset()",
        'rows(32).to_iterable_dataset(num_shards=4).with_format("torch").shuffle(seed=1)',
        "DataLoader(rows(32).to_iterable_dataset(), batch_size=4)",
    ],
)
def test_rows_of_hugging_face_data_sets_are_shared(prepared, data):
    prepared.run(f"data = {data}", show=False)
    run = prepared.train(ROWS_CELL, data="data", epochs=2, micro_batch_size=4, show=False)
    assert run.steps == 8
    for ranks in samples_by_epoch(prepared).values():
        assert sorted(ranks[0] + ranks[1]) == ALL


@pytest.mark.parametrize(
    "data",
    [
        "DataLoader(Numbers(32), batch_sampler=BatchSampler(RandomSampler(range(32)), 4, False))",
        "DataLoader(Numbers(32), batch_sampler=[[4 * i + j for j in range(4)] for i in range(8)],"
        " num_workers=1)",
        "DataLoader(ready(range(32)), batch_size=None, shuffle=True)",
    ],
    ids=["batch sampler", "list", "no batch size"],
)
def test_ranks_share_the_batches_that_a_loader_makes_itself(prepared, data):
    # a subclass is a person's own batch sampler
    prepared.run("class BatchSampler(BatchSampler):\n    pass\n", show=False)
    prepared.run(f"data = {data}", show=False)
    run = prepared.train(CELL, data="data", epochs=2, show=False)
    for ranks in samples_by_epoch(prepared).values():
        assert sorted(ranks[0] + ranks[1]) == ALL
        assert len(ranks[0]) == len(ranks[1])
    assert run.state == "done"


def test_a_function_gets_the_epoch_and_is_called_on_each(prepared):
    prepared.run(
        "calls = []\n"
        "def data(epoch):\n    calls.append(epoch)\n    return (b for b in ready([epoch] * 3))",
        show=False,
    )
    run = prepared.train(CELL, data="data", epochs=2, show=False)
    assert run.steps == 6
    assert samples_by_epoch(prepared)[1] == [[1, 1, 1], [1, 1, 1]]
    assert prepared.pull("calls")[:2] == [0, 1]


def test_several_sources_give_a_tuple_and_the_shortest_ends_the_epoch(prepared):
    prepared.run('sources = {"a,b": Numbers(64), "c": Ready(range(3))}', show=False)
    cell = "seen.append([int(part[0]) for part in batch])\nloss = model(batch[0]).pow(2).mean()"
    options = {"micro_batch_size": None, "no_shuffle": False, "show": False}
    names = 'sources["a,b"],DataLoader(sources["a,b"],batch_size=4),sources["c"]'
    run = prepared.train(cell, data=names, **options)
    assert run.steps == 3
    assert [part[2] for part in prepared.pull("seen")] == [0, 1, 2]
    assert [part[1] for part in prepared.pull("seen", rank=1)] == [4, 12, 20]


def test_every_rank_reads_all_of_the_data_where_it_is_not_shared(prepared):
    prepared.run("data = Numbers(16)", show=False)
    run = prepared.train(CELL, data="data", data_sharding="none", micro_batch_size=4, show=False)
    assert run.steps == 4
    ranks = samples_by_epoch(prepared)[0]
    assert ranks[0] == ranks[1]
    assert sorted(ranks[0]) == list(range(16))


def test_the_global_batch_size_sets_the_accumulation(prepared):
    prepared.run("data = Numbers(96)", show=False)
    run = prepared.train(CELL, data="data", global_batch_size=24, micro_batch_size=4, show=False)
    assert run.steps == 4
    assert len(prepared.pull("seen")) == 12


def test_batches_of_tokens_have_like_lengths_and_are_padded_by_the_persons_function(prepared):
    prepared.run(
        "data = [torch.full((1 + i % 7, 1), float(i), dtype=torch.float64) for i in range(80)]\n"
        "def pad(samples):\n"
        "    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)\n",
        show=False,
    )
    cell = (
        "seen.append((epoch, [int(x) for x in batch[:, 0, 0]]))\n"
        "shapes.append(batch.shape[0] * batch.shape[1])\n"
        "loss = model(batch).pow(2).mean()"
    )
    prepared.run("shapes = []", show=False)
    run = prepared.train(
        cell, data="data", tokens_per_batch=20, collate="pad", epochs=2, accumulate=2, show=False
    )
    assert run.state == "done"
    for ranks in samples_by_epoch(prepared).values():
        assert len(set(ranks[0] + ranks[1])) == len(ranks[0] + ranks[1]) > 40
    assert max(prepared.pull("shapes", rank=0) + prepared.pull("shapes", rank=1)) <= 20


# -- lengths that differ (F21)


@pytest.mark.parametrize(
    ("data", "steps"),
    [
        ("Numbers(64 if rank else 40)", [5, 5]),
        ("ready(range(3 + rank))", [1, 1]),  # a list holds samples, so 8 × 2 ranks in a step
        ("Ready(range(3 + 2 * rank))", [3, 3]),
        ("Stream(64 if rank else 40)", [5, 5]),
        ("DataLoader(Numbers(64 if rank else 40), batch_size=4)", [5, 5]),
    ],
)
def test_unequal_lengths_give_every_rank_the_same_steps_of_every_epoch(prepared, data, steps):
    if data.startswith("ready"):
        data, size = "ready(range(8 + 4 * rank))", 4
    else:
        size = None if "Ready" in data else 4
    prepared.run(f"data = {data}", show=False)
    run = prepared.train(CELL, data="data", epochs=2, micro_batch_size=size, show=False)
    assert (run.state, run.steps) == ("done", sum(steps))
    for rank in (0, 1):
        epochs = [epoch for epoch, _ in prepared.pull("seen", rank=rank)]
        assert epochs == [0] * steps[0] + [1] * steps[1]


# -- workers

WORKERS = """
class Traced(Numbers):
    def __getitem__(self, index):
        if index >= 0:
            open(f"{directory}/{os.getpid()}", "w").close()
        return super().__getitem__(index)
"""


def workers_of(path):
    return [int(name) for name in os.listdir(path)]


def runs(pid):
    """Return whether a process runs: one that nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_gone(pids, seconds=2.0):
    deadline = time.monotonic() + seconds
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if runs(pid)]


LEFT_TRANSPORTS = """
import datetime, gc
import torch.distributed as dist

class Held:
    def __init__(self):
        self.itself = self  # only a collection finds it
        ten = datetime.timedelta(seconds=10)
        self.group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, ten)

def collect(worker):
    gc.enable()
    gc.collect()

gc.disable()
Held()
data = DataLoader(Numbers(64), batch_size=4, num_workers=1, worker_init_fn=collect)
"""


def test_a_worker_that_collects_garbage_does_not_wait_for_its_engines_threads(prepared):
    try:
        prepared.run(LEFT_TRANSPORTS, show=False)
        run = prepared.train(CELL, data="data", steps=2, timeout=20, show=False)
        assert (run.state, run.steps) == ("done", 2)
    finally:
        prepared.run("gc.enable()\ngc.collect()", show=False)


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("ending", ["done", "failed", "one epoch and a half"])
def test_no_worker_is_left_after_a_run(prepared, tmp_path, persistent, ending):
    prepared.push(directory=str(tmp_path))
    prepared.run(
        WORKERS + "data = DataLoader(Traced(64), batch_size=4, num_workers=2, "
        f"persistent_workers={persistent})",
        show=False,
    )
    if ending == "failed":
        with pytest.raises(CellFailedError):
            prepared.train(CELL + "\nif step == 3: 1 / 0", data="data", show=False)
    else:
        steps = None if ending == "done" else 12
        prepared.train(CELL, data="data", steps=steps, epochs=None if steps else 2, show=False)
    started = workers_of(tmp_path)
    if ending != "failed":
        assert len(started) == (4 if persistent else 8)
    assert until_gone(started) == []


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("slow", ["cell", "data"])
def test_an_interrupted_run_leaves_no_worker(prepared, tmp_path, slow, presses):
    prepared.push(directory=str(tmp_path))
    prepared.run(
        "import time\n"
        + WORKERS.replace(
            "        return", f"        time.sleep({0.3 * (slow == 'data')})\n        return"
        )
        + "data = DataLoader(Traced(6400), batch_size=4, num_workers=1)",
        show=False,
    )
    cell = CELL if slow == "data" else CELL + "\ntime.sleep(1.0)"
    with (
        interrupted_after(*(0.6 + 0.3 * i for i in range(presses))),
        pytest.raises(CellInterrupted),
    ):
        prepared.train(cell, data="data", show=False)
    started = workers_of(tmp_path)
    assert len(started) == 2
    assert until_gone(started) == []


STOPPED_STARTS = """
import threading
start, stopped = threading.Thread.start, []

def start_and_stop(thread):
    start(thread)
    if thread.name == "QueueFeederThread" and not stopped:
        stopped.append(thread)
        raise RuntimeError("stopped")

def of_queues():
    return [t.name for t in threading.enumerate()].count("QueueFeederThread")

threading.Thread.start = start_and_stop
data = DataLoader(Numbers(64), batch_size=4, num_workers=2)
"""


def test_a_queue_that_was_stopped_as_it_started_leaves_no_thread(prepared):
    prepared.run(STOPPED_STARTS, show=False)
    try:
        with pytest.raises(CellFailedError, match="stopped"):
            prepared.train(CELL, data="data", show=False)
    finally:
        prepared.run("threading.Thread.start = start", show=False)
    deadline = time.monotonic() + 5
    while any(prepared.pull("of_queues()", rank="all")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert prepared.pull("of_queues(), len(stopped)", rank="all") == [(0, 1)] * 2
    assert prepared.train(CELL, data="data", steps=2, show=False).state == "done"


def test_workers_die_with_their_engine_and_peers_are_released_at_once(prepared, tmp_path):
    """F40: what a worker inherits, the sockets too, it would keep open."""
    session = prepared
    session.push(directory=str(tmp_path))
    session.run(
        WORKERS + "data = DataLoader(Traced(10_000), batch_size=4, num_workers=2)", show=False
    )
    cell = (
        "if rank == 1 and step == 3:\n"
        "    open(f'{directory}.died', 'w').close()\n    os.kill(os.getpid(), 9)\n" + CELL
    )
    with pytest.raises(EngineDiedError) as caught:
        session.train(cell, data="data", show=False)
    seen_after = time.time() - os.stat(f"{tmp_path}.died").st_mtime
    assert (caught.value.rank, caught.value.signal) == (1, signal.SIGKILL)
    assert seen_after < 5.0
    assert until_gone(workers_of(tmp_path)) == []


ORPHANS = """
import multiprocessing, os, signal, sys
from torch.utils.data import DataLoader
from fsdp_magic.engine.workers import LoaderIterators, rebuilt

loader = rebuilt(DataLoader(range(64), num_workers=2), seed=0)
iterators = LoaderIterators(loader=loader)
next(iterators.begin(0))
with open(sys.argv[1], "w") as file:
    print(*[child.pid for child in multiprocessing.active_children()], file=file)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_die_with_a_killed_process_by_themselves(tmp_path):
    """Nobody need look after them; torch's own look takes up to 5 s."""
    path = tmp_path / "pids"
    subprocess.run([sys.executable, "-c", ORPHANS, str(path)], check=False)
    pids = [int(pid) for pid in path.read_text().split()]
    assert len(pids) == 2
    assert until_gone(pids, seconds=1.0) == []


def test_a_persons_own_start_of_workers_is_kept(prepared, tmp_path):
    prepared.push(directory=str(tmp_path))
    prepared.run(
        "def start(worker):\n    open(f'{directory}/{rank_}-{worker}', 'w').close()\n"
        "rank_ = rank\n"
        "data = DataLoader(Numbers(16), batch_size=4, num_workers=2, worker_init_fn=start)",
        show=False,
    )
    prepared.train(CELL, data="data", show=False)
    assert sorted(os.listdir(tmp_path)) == ["0-0", "0-1", "1-0", "1-1"]


# -- the next run goes on


@pytest.mark.parametrize(
    "data",
    [
        "Numbers(64)",
        "DataLoader(Stream(64, draws=True), batch_size=4)",
        "DataLoader(Stream(64, draws=True), batch_size=4, num_workers=1)",
        "lambda: (batch for batch in ready(range(16)))",
    ],
)
def test_a_second_run_goes_on_after_a_failed_step(prepared, data):
    size = None if data.startswith("lambda") else 4
    prepared.run(f"data = {data}", show=False)
    with pytest.raises(CellFailedError):
        prepared.train(
            "if step == 2: 1 / 0\n" + CELL,
            data="data",
            steps=5,
            micro_batch_size=size,
            show=False,
        )
    prepared.train(CELL, data="data", steps=6, micro_batch_size=size, show=False)
    taken = samples_by_epoch(prepared)[0]
    if size is None:
        assert taken == [list(range(8)), list(range(8))]
    else:
        assert sorted(taken[0] + taken[1]) == list(range(64))


# -- evaluation

EVALUATE = """
from fsdp_magic.engine.agreement import WorldAgreement
from fsdp_magic.engine.eval_batches import EvalBatches
import builtins

def evaluated(source, **options):
    world = builtins._fsdp_magic_call.__self__.world
    batches = EvalBatches(
        source, rank=world.rank, world_size=world.world_size, device=world.device,
        agreement=WorldAgreement(world), **options,
    )
    found = [
        (each.start, each.count, [int(x) for x in each.batch.flatten()]) for each in batches
    ]
    batches.close()
    return found
"""


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("Numbers(37)", "micro_batch_size=4"),
        ("Numbers(1)", ""),
        ("DataLoader(Numbers(37), batch_size=4, shuffle=True, num_workers=1)", ""),
        ("Stream(37)", "micro_batch_size=4"),
        ("DataLoader(Stream(37), batch_size=4, num_workers=1)", ""),
        ("DataLoader(Numbers(37), batch_sampler=[[i] for i in range(37)])", ""),
        ("lambda: Numbers(37)", "micro_batch_size=5"),
        ("Ready(range(rank, 37, 2))", ""),
    ],
)
def test_evaluation_takes_every_sample_once_in_equally_many_passes(prepared, data, options):
    length = 1 if "(1)" in data else 37
    prepared.run(EVALUATE, show=False)
    prepared.run(f"found = evaluated({data}, {options})", show=False)
    ranks = prepared.pull("found", rank="all")
    assert len(ranks[0]) == len(ranks[1])
    counted = sorted(part for rank in ranks for part in rank if part[1])
    assert [sample for _, _, samples in counted for sample in samples] == list(range(length))


# -- what cannot work


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ("torch.nn.Linear(2, 1)", {}, "--data is a model; name the data that it reads"),
        ("7", {}, "--data is a int, which holds no batches; it takes a data set"),
        ("'text'", {}, "--data is a str, which holds no batches"),
        ("{'train': [1], 'test': [2]}", {}, r'--data is a dict.*--data NAME\["train"\]'),
        (
            "datasets.DatasetDict(train=rows(8))",
            {},
            r'--data is a DatasetDict.*--data NAME\["train"\]',
        ),
        ("Numbers", {}, "--data is a type, which holds no batches"),
        ("[]", {}, "the data is empty; bind data that holds samples"),
        ("Numbers(5)", {}, "has 5 samples and one step takes 8 × 1 × 2 ranks = 16 samples"),
        ("Stream(5)", {}, "yields 5 samples and one step takes 8 × 1 × 2 ranks = 16 samples"),
        ("Ready([])", {}, "an epoch of the data does not fill a step"),
        ("Ready([])", {"steps": 3}, "an epoch of the data does not fill a step"),
        ("iter(())", {}, "an iterator can be read only once; bind it anew"),
        ("iter(ready([1]))", {"epochs": 2}, "--epochs 2 reads the data 2 times"),
        ("Numbers(16)", {"collate": "rank_"}, "--collate rank_ is a int; it takes a function"),
        ("Numbers(16)", {"collate": "nothing"}, "--collate nothing is not there"),
        (
            "[torch.ones(n, 1) for n in range(1, 17)]",
            {},
            "the samples of a batch differ in length.*pass --collate NAME",
        ),
        (
            "DataLoader([torch.ones(n, 1) for n in range(1, 17)], batch_size=8, num_workers=1)",
            {},
            "^(rank|ranks|on rank)?.*the samples of a batch differ in length",
        ),
        ("[object()] * 16", {}, "samples of type object cannot be put into a batch"),
        ("lambda a, b: 1", {}, "wants a, b; a function for data is called with the epoch"),
        ("lambda: None", {}, "is a function, and it returned NoneType"),
        ("Numbers(64)", {"global_batch_size": 50}, "no multiple of 8 × 1 × 2 ranks.*give 48 or 64"),
        ("Numbers(64)", {"global_batch_size": 4}, "give 16, or another --micro-batch-size"),
        ("Ready(range(9))", {"global_batch_size": 4}, "--global-batch-size 4 is for samples"),
        ("Ready(range(9))", {"tokens_per_batch": 4}, "--tokens-per-batch 4 is for samples"),
        ("Stream(64)", {"tokens_per_batch": 4}, "--tokens-per-batch 4 sorts samples by length"),
        (
            "[torch.tensor(1.0)] * 64",
            {"tokens_per_batch": 4},
            "sample 0 is a Tensor without any; give it input_ids",
        ),
        (
            "[torch.ones(9 if n == 5 else 1, 1) for n in range(64)]",
            {"tokens_per_batch": 4},
            "sample 5 has 9 tokens, more than --tokens-per-batch 4; give --tokens-per-batch 9",
        ),
        (
            "[torch.ones(4, 1)] * 3",
            {"tokens_per_batch": 4, "accumulate": 2},
            "make 3 batches of at most 4 tokens, and one step takes 4",
        ),
    ],
)
def test_wrong_data_is_one_line_that_says_what_to_type(prepared, data, options, words):
    prepared.run(f"rank_ = 0\ndata = {data}", show=False)
    with pytest.raises(CellFailedError, match=words) as caught:
        prepared.train(CELL, data="data", show=False, **options)
    assert "Traceback" not in str(caught.value)


def test_data_that_is_wrong_on_one_rank_fails_at_once(prepared):
    prepared.run("data = Numbers(64) if rank else []", show=False)
    started = time.monotonic()
    with pytest.raises(CellFailedError, match="the data is empty"):
        prepared.train(CELL, data="data", show=False)
    assert time.monotonic() - started < 2.0
    prepared.run("data = Numbers(64)", show=False)
    assert prepared.train(CELL, data="data", show=False).steps == 4


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        ("one,two", {"collate": "len"}, "--collate len cannot say which of one, two it is for"),
        ("one,missing", {}, "--data missing is not there"),
        ("one,(", {}, "is no Python expression"),
        ("a=one", {}, "names no data"),
        (
            "one,small",
            {"global_batch_size": 16},
            "--global-batch-size needs the same micro-batch size of all data",
        ),
    ],
)
def test_wrong_names_are_one_line(prepared, names, options, words):
    prepared.run(
        "one = two = Numbers(64)\nsmall = DataLoader(Numbers(64), batch_size=2)", show=False
    )
    with pytest.raises(CellFailedError, match=words):
        prepared.train(CELL, data=names, show=False, **options)
