"""Tab offers options, values and names on the engines, and never disturbs anything."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from fsdp_magic.notebook import inspection, sessions
from fsdp_magic.notebook.session import Session

BOUND = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.encoded = nn.Linear(4, 4), 1

    @property
    def encouraging(self):
        raise SystemExit("a property ran")

    def forward(self, tokens, mask=None):
        return self.encoder(tokens)

train_data = list(range(8))
train_rows = 8
nets = {"Generator": 1, "Critic": 2}
"""
MODEL = "net = Net()\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)"


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    config = Config({"HistoryManager": {"enabled": False}})
    home = str(tmp_path_factory.mktemp("ipython"))
    shell = InteractiveShell.instance(config=config, ipython_dir=home, colors="nocolor")
    shell.run_line_magic("load_ext", "fsdp_magic")
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture
def tab(
    shell: InteractiveShell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> InteractiveShell:
    """A shell whose session has names bound on its engines."""
    monkeypatch.setattr(sessions, "_CURRENT", [session])
    monkeypatch.setattr(inspection, "_COMPLETION_SECONDS", 10.0)  # a busy machine takes its time
    session.run(BOUND, show=False)
    session.model(MODEL, show=False)
    return shell


def offered(shell: InteractiveShell, text: str) -> list[str]:
    """Return what a cell looks like with each completion at its ``|``, as the kernel offers it."""
    cursor = text.index("|")
    cell = text.replace("|", "")
    with provisionalcompleter():
        found = list(shell.Completer.completions(cell, cursor))
    return [cell[: c.start] + c.text + cell[c.end :] for c in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%%fsdp_train --data train_|", ["train_data", "train_rows"]),
        ("%%fsdp_train --data=train_d|", ["train_data"]),
        ("%%fsdp_train --dataset train_d|", ["train_data"]),
        ("%%fsdp_train --steps train_r|", ["train_rows"]),
        ("%%fsdp_train --after-step net.enco|", ["net.encoded", "net.encoder"]),
        ('%%fsdp_model nets["Cr|', ['nets["Critic"]', 'nets["Critic']),
        ("%fsdp_shards net|", ["net", "nets"]),
        ("%fsdp_pull net.encoder.wei|", ["net.encoder.weight"]),
        ("x = %fsdp_pull train_r| --yes", ["train_rows"]),
    ],
)
def test_values_are_names_on_the_engines(
    tab: InteractiveShell, line: str, expected: list[str]
) -> None:
    before, _, after = line.partition("|")
    start = max(before.rfind(" "), before.rfind("=")) + 1
    found = {text.removesuffix(after)[start:] for text in offered(tab, line)}
    assert found & set(expected)
    assert found <= {*expected, "net.encouraging"}


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("%%fsdp\nprint(train_d|)", "print(train_data)"),
        ("%%fsdp --ranks 0\n\nx = 1\nnet.encoder.bia|", "net.encoder.bias"),
        ("%%fsdp_model\nother = Ne|", "other = Net"),
        ("%%fsdp_train --data train_data\nloss = net.enco|(batch)", "loss = net.encoder(batch)"),
        ("%%fsdp_train\nloss = net(micro_ba|)", "loss = net(micro_batch_size)"),
        ("%%fsdp_eval\nfsdp.gat|", "fsdp.gather"),
        ("%%fsdp\nworld_s|", "world_size"),
        ("%%fsdp\ny = net.encoder.weight.requires_g|", "y = net.encoder.weight.requires_grad"),
        ('%%fsdp\nnets["Gen|', 'nets["Generator"]'),
    ],
)
def test_names_on_the_engines_complete_in_cells(
    tab: InteractiveShell, cell: str, line: str
) -> None:
    lines = {text.splitlines()[-1].rstrip("]\"'") for text in offered(tab, cell)}
    assert line.rstrip("]\"'") in lines


def test_no_property_of_a_person_runs_and_private_names_stay_away(tab: InteractiveShell) -> None:
    found = offered(tab, "%%fsdp\nnet.encouraging.|")
    assert found == []
    names = offered(tab, "%fsdp_pull |")
    assert "%fsdp_pull train_data" in names
    assert not any(text.split()[-1].startswith("_") for text in names if " --" not in text)


def test_a_cell_still_runs_after_many_completions(tab: InteractiveShell, session: Session) -> None:
    for _ in range(20):
        assert offered(tab, "%%fsdp\ntrain_d|") == ["%%fsdp\ntrain_data"]
    outputs = session.run("print('after')\n1 + rank", show=False)
    assert [(o.stdout, o.result) for o in outputs] == [("after\n", "1"), ("after\n", "2")]


def test_a_slow_object_is_given_up_and_the_next_cell_is_not_late(
    tab: InteractiveShell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_COMPLETION_SECONDS", 0.5)
    session.run(
        "import time\nclass Slow:\n    def __dir__(self):\n        time.sleep(60)\nslow = Slow()",
        show=False,
    )
    started = time.monotonic()
    assert offered(tab, "%%fsdp\nslow.a|") == []
    assert session.run("1", show=False, timeout=20)[0].result == "1"
    assert time.monotonic() - started < 5


def test_nothing_is_asked_without_living_engines(
    tab: InteractiveShell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.engines, "broken", RuntimeError("dead"))
    assert offered(tab, "%%fsdp\ntrain_d|") == []
    monkeypatch.setattr(sessions, "_CURRENT", [])
    assert offered(tab, "%%fsdp\ntrain_d|") == []
    assert offered(tab, "%fsdp_init --memo|") == ["%fsdp_init --memory-limit"]


def test_what_is_printed_while_completing_is_not_shown(
    tab: InteractiveShell, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = "class Loud:\n    def __dir__(self):\n        print('loud')\n        return ['a_b']"
    session.run(f"{loud}\nloud = Loud()", show=False)
    assert offered(tab, "%%fsdp\nloud.a_|") == ["%%fsdp\nloud.a_b"]
    session.run("print('cell')")
    assert capsys.readouterr().out == "[ranks 0-1] cell\n"


def test_px_is_not_interrupted_by_tab(
    tab: InteractiveShell, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_COMPLETION_SECONDS", 0.5)
    view = session.client[:]
    running = view.execute("import time\ntime.sleep(3)\npx_done = 1", block=False)
    started = time.monotonic()
    assert offered(tab, "%%fsdp\ntrain_d|") == []
    assert time.monotonic() - started < 3
    running.get(timeout=10)
    assert session.pull("px_done") == 1
