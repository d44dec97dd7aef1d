"""What Tab offers on a magic's line, in a real shell without engines."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from fsdp_magic.core.completion import Completions
from fsdp_magic.core.options import options_of
from fsdp_magic.core.specs import MAGICS
from fsdp_magic.notebook import completion, sessions


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    config = Config({"HistoryManager": {"enabled": False}})
    home = str(tmp_path_factory.mktemp("ipython"))
    shell = InteractiveShell.instance(config=config, ipython_dir=home, colors="nocolor")
    shell.run_line_magic("load_ext", "fsdp_magic")
    shell.user_ns |= {"vocabulary": 1, "vocal": 2, "_private": 3}
    yield shell
    shell.restore_sys_module_state()
    InteractiveShell.clear_instance()


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "current", lambda: None)


def offered(shell: InteractiveShell, cell: str) -> list[str]:
    """Return the words offered at the ``|`` of a cell, or at its end, as the kernel does."""
    cursor = cell.find("|") if "|" in cell else len(cell)
    with provisionalcompleter():
        return [c.text for c in shell.Completer.completions(cell.replace("|", ""), cursor)]


@pytest.mark.parametrize("magic", MAGICS)
def test_every_option_of_every_magic_is_offered(shell: InteractiveShell, magic: str) -> None:
    flags = [o.flags[0] for o in options_of(MAGICS[magic]).values() if o.flags]
    wanted = [flag for flag in flags if flag.startswith("--")]
    found = offered(shell, f"{magic} --")
    assert found == (wanted or ["--"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%fsdp_init --memo", ["--memory-limit"]),
        ("run = %fsdp_init --memo", ["--memory-limit"]),
        ("%fsdp_init --memory_l", ["--memory-limit"]),
        ("%fsdp_init --sh| --seed 3", ["--share-gpus", "--shard-size"]),
        ("%fsdp_init --shard-s| --seed 3", ["--shard-size"]),
        ("%fsdp_init --device ", ["auto", "cuda", "cpu"]),
        ("%fsdp_init --device=c", ["cuda", "cpu"]),
        ("%fsdp_init --strategy z", ["zero1", "zero3", "zero2", "zero0"]),
        (
            "%fsdp_init --strategy ",
            ["full_shard", "shard_grad_op", "zero1", "ddp", "hybrid_shard"],
        ),
        ("%%fsdp_model --bf", ["--bf16"]),
        (
            "%fsdp_compare --strategies ",
            ["ddp", "zero1", "hybrid_shard", "shard_grad_op", "full_shard"],
        ),
        ("%fsdp_compare --strategies full_shard,d", ["ddp"]),
        ("%fsdp_compare --strategies=ddp+bf16,full_shard+a", ["activation_checkpointing"]),
        (
            "%fsdp_compare --strategies ddp+bf16+",
            ["fp32", "fp16", "cpu_offload", "activation_checkpointing"],
        ),
        ("%%fsdp_plan --gpu-memory A100", ["A100-40GB", "A100-80GB"]),
        ("%fsdp_plan --strategies ddp,full_shard+cpu", ["cpu_offload"]),
        ("%%fsdp_plan --seq", ["--seq-len"]),
        ("%fsdp_tune --ob", ["--objective"]),
        ("%%fsdp_tune --objective ", ["memory", "throughput"]),
        ("%fsdp_tune --objective=thr", ["throughput"]),
        ("%fsdp_tune --strategies ddp,full_shard+act", ["activation_checkpointing"]),
        ("%%fsdp_tune --loss t", ["tokens"]),
        ("%fsdp_tune --max-b", ["--max-batch-size"]),
        ("%%fsdp_model --no-comp", ["--no-compile"]),
        ("%%fsdp_model --activation-checkpointing=", ["blocks", "selective"]),
        ("%%fsdp_model --activation-checkpointing se", ["selective"]),
        ("%%fsdp_model --activation-checkpointing --acc", ["--accumulate-sync"]),
        ("%%fsdp_model --activation-checkpointing selective --acc", ["--accumulate-sync"]),
        ("%%fsdp_model --bf16 --compi", ["--compile"]),
        ("%%fsdp_model --wrap ", ["blocks", "size:", "none"]),
        ("%%fsdp_model --wrap s", ["size:"]),
        ("%%fsdp_model --bf16 --prec", ["--prec"]),
        ("%%fsdp_train --eval-every e\nloss = 1", []),
        ("%%fsdp_train --eval-every e|\nloss = 1", ["epoch"]),
        ("%%fsdp_train --eval_steps ep", ["epoch"]),
        ("%%fsdp_train --loss TOK", ["tokens"]),
        ("%%fsdp_train --data d --dat", ["--data-sharding"]),
        ("%%fsdp_train --dataset d --da", ["--data-sharding"]),
        ("%%fsdp_train --clip 1 --max-g", ["--max-g"]),
        ("%%fsdp_train --cl", ["--clip"]),
        ("%%fsdp_train --no-sh", ["--no-shuffle"]),
        ("%%fsdp_train -o ru", ["ru"]),
        ("%%fsdp --ti", ["--timeout"]),
        ("\n%%fsdp --ti", ["--timeout"]),
        ("%fsdp_push voc", ["vocabulary", "vocal"]),
        ("%%fsdp_train --log voc", ["vocabulary", "vocal"]),
        ("%fsdp_pull --rank a", ["all"]),
        ("%fsdp_status ", [""]),
    ],
)
def test_what_fits_is_offered_and_nothing_else(
    shell: InteractiveShell, line: str, words: list[str]
) -> None:
    assert offered(shell, line) == words


def test_names_of_habit_are_offered_where_none_of_our_own_fits(shell: InteractiveShell) -> None:
    assert offered(shell, "%%fsdp_train --ma") == ["--max-grad-norm", "--manual"]
    assert offered(shell, "%%fsdp_train --max-s") == ["--max-steps"]


def test_options_carry_their_help(shell: InteractiveShell) -> None:
    with provisionalcompleter():
        (found,) = shell.Completer.completions("%%fsdp_train --max-g", 20)
    assert found.type == "clip the global gradient norm to this"


@pytest.mark.parametrize(
    "cell",
    [
        "print('%fsdp_init --d",
        "%%fsdp --ranks 0 # --t",
        "x = 1\n%%fsdp --ti",
        "%fsdpx --s",
        "fsdp --",
    ],
)
def test_elsewhere_no_option_is_offered(shell: InteractiveShell, cell: str) -> None:
    assert not any(word.startswith("--") for word in offered(shell, cell))


def test_other_completions_are_left_alone(shell: InteractiveShell) -> None:
    assert "vocabulary" in offered(shell, "voca")
    assert "vocabulary" in offered(shell, "x = 'fsdp'\nvoca")
    assert "%fsdp_init" in offered(shell, "%fsdp_in")


def test_loading_twice_offers_once(shell: InteractiveShell) -> None:
    completion.register(shell)
    assert offered(shell, "%fsdp_init --memo") == ["--memory-limit"]


def test_what_goes_wrong_inside_is_nobodys_business(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(sessions, "current", broken)
    assert "vocabulary" in offered(shell, "%%fsdp\nvoca")
    assert capsys.readouterr() == ("", "")


def test_an_older_ipython_loads_without_completion(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sys.modules["IPython.core.completer"], "context_matcher")
    before = list(shell.Completer.custom_matchers)
    completion.register(shell)
    assert shell.Completer.custom_matchers == before


def test_a_cell_that_is_not_ours_costs_nothing(shell: InteractiveShell) -> None:
    (matcher,) = (
        m
        for m in shell.Completer.custom_matchers
        if getattr(m, "matcher_identifier", "") == completion.IDENTIFIER
    )

    class Context:
        full_text = "x = 1\n" * 10_000
        token = "x"

    started = time.perf_counter()
    for _ in range(100):
        assert list(matcher(Context())["completions"]) == []
    assert time.perf_counter() - started < 0.1


def test_values_stand_before_names_on_the_engines(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Completions(fragment="", texts=("model", "optimizer"))
    monkeypatch.setattr(completion, "_on_engines", lambda line: found)
    words = offered(shell, "%%fsdp_model --activation-checkpointing ")
    assert words[:4] == ["blocks", "selective", "model", "optimizer"]
    assert words[4] == "--strategy"
