"""What a plan makes of a cell: large tensors without memory, cards that are not there, defaults."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fsdp_magic.core.errors import FsdpError
from fsdp_magic.core.planning.requests import TraceVariant
from fsdp_magic.engine.planning import files_read
from fsdp_magic.engine.planning.batches import default_batch
from fsdp_magic.engine.planning.checkpoints import weights_stay_in_files
from fsdp_magic.engine.planning.fake_mode import PlanningMode, errors_told_once, known_values
from fsdp_magic.engine.planning.files_read import FilesRead
from fsdp_magic.engine.planning.no_card import NoCard, cards_are_the_host
from fsdp_magic.engine.planning.program import (
    Described,
    NoValuesError,
    namespace_of_cell,
    program_in,
)
from fsdp_magic.engine.planning.traces import traces_of
from fsdp_magic.engine.planning.weightless import make_fake, weightless
from fsdp_magic.notebook import trace_cache

HEAD = "import torch\nfrom torch import nn\nF = nn.functional\n"
NET = "model = nn.Sequential(nn.Linear(4, 700_000), nn.Linear(700_000, 2))\n"
BATCH = "def example_batch(b): return torch.zeros(b, 4), torch.zeros(b, dtype=torch.long)\n"
LOSS = "def loss_fn(model, batch): return F.cross_entropy(model(batch[0]), batch[1])\n"


@pytest.fixture(autouse=True)
def _main_module_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell runs as ``__main__``; afterwards the tests' own is back."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def ran(
    cell: str, mode: FakeTensorMode | None = None, **options: Any
) -> tuple[Described, FakeTensorMode]:
    """Run a cell as the tracing process does, and return what it describes."""
    fake = mode or FakeTensorMode(allow_non_fake_inputs=True)
    code = textwrap.dedent(cell)
    with cards_are_the_host(), NoCard(), weights_stay_in_files(), weightless(fake):
        namespace = namespace_of_cell(code, "<%%fsdp_plan [1]>")
    program = program_in(namespace, sequence_length=options.get("sequence_length"))
    make_fake(program.model, program.optimizers, fake)
    return program, fake


def loss_of(program: Described, fake: FakeTensorMode, samples: int = 3) -> torch.Tensor:
    with cards_are_the_host(), NoCard(), fake:
        loss = program.loss_of(program.make_batch(samples))
        loss.backward()
    return loss


def test_a_model_beyond_all_memory_is_built_and_trained() -> None:
    cell = HEAD + "model = nn.Linear(1_000_000, 1_000_000)\n" + BATCH.replace("4", "1_000_000")
    program, fake = ran(cell + LOSS)
    loss_of(program, fake)
    assert all(isinstance(p, FakeTensor) for p in program.model.parameters())
    assert program.model.weight.grad.nbytes == 4 * 10**12


def test_constructors_may_compute_with_what_is_small() -> None:
    rates = "rates = [x.item() for x in torch.linspace(0, 1, 3)]\nassert rates[1] == 0.5\n"
    program, fake = ran(HEAD + rates + NET + BATCH + LOSS)
    assert loss_of(program, fake).shape == ()


@pytest.mark.parametrize(
    "move",
    [
        "model = model.to('cuda')",
        "model.cuda()",
        "model.to(torch.device('cuda', 0), torch.bfloat16).to(torch.float32)",
        "torch.cuda.set_device(0); model.to(0)",
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 1",
        "torch.set_default_device('cuda')",
        "x = torch.zeros(3, device='cuda').pin_memory().cuda(non_blocking=True)",
        "with torch.autocast('cuda', dtype=torch.bfloat16): assert nn.Linear(2, 2)("
        "torch.zeros(1, 2, device='cuda')).dtype == torch.bfloat16",
        "model = torch.compile(model); model.compile()",
    ],
)
def test_a_cell_for_a_card_runs_without_one(move: str) -> None:
    batch = BATCH.replace("4)", "4, device='cuda')").replace("long)", "long).cuda()")
    program, fake = ran(HEAD + NET + move + "\n" + batch + LOSS)
    loss_of(program, fake)
    assert {p.device.type for p in program.model.parameters()} == {"cpu"}


def test_afterwards_torch_is_as_it_was() -> None:
    def changed() -> list[Any]:
        of_cards = [torch.cuda.is_available, torch.set_default_device, torch.autocast.__init__]
        return [*of_cards, nn.Module._apply, nn.Module.compile, torch.load, torch.compile]

    before = changed()
    ran(HEAD + NET + BATCH + LOSS)
    assert changed() == before


def test_parameters_stay_those_of_the_optimizers_and_tied() -> None:
    tied = "model[1].weight = nn.Parameter(model[0].weight.t()); model.again = model[0]\n"
    groups = "optimizer = torch.optim.SGD([{'params': [p]} for p in model.parameters()], lr=1)\n"
    program, _ = ran(HEAD + NET + tied + groups + BATCH + LOSS)
    (optimizer,) = program.optimizers
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert [id(p) for p in held] == [id(p) for p in program.model.parameters()]
    assert len(held) == 4


def test_without_an_optimizer_it_is_adamw_and_says_so() -> None:
    program, _ = ran(HEAD + NET + BATCH + LOSS)
    assert [type(o) for o in program.optimizers] == [torch.optim.AdamW]
    assert any("AdamW" in note for note in program.notes)


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ("net = nn.Linear(2, 2)", "binds no `model`; add: model = net"),
        ("x = 1", "add: model = MyModel()"),
        ("model = 'gpt2'", "`model` is a str; the cell of a plan binds a torch.nn.Module"),
        (NET, "def example_batch(b)"),
        (NET + BATCH, "def loss_fn(model, batch)"),
        (NET + BATCH + "loss_fn = 3", "`loss_fn` is a int; it is a function, called as loss_fn("),
        (NET + BATCH + LOSS + "model.requires_grad_(False)", "nothing to train"),
        ("!pip list\n" + NET, "line 4 is a magic or a command"),
        (NET + "%matplotlib inline", "is a magic or a command"),
    ],
)
def test_a_cell_that_lacks_something_is_told_what_to_write(cell: str, says: str) -> None:
    with pytest.raises(FsdpError) as caught:
        ran(HEAD + cell)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        ("model(batch[0])", "must have one element"),
        ("None", "end it with: return loss"),
        ("model(batch[0]).mean().detach()", "does not require grad"),
    ],
)
def test_a_loss_that_is_none_is_told_so(loss_fn: str, says: str) -> None:
    program, fake = ran(HEAD + NET + BATCH + f"def loss_fn(model, batch): return {loss_fn}")
    with pytest.raises(FsdpError, match=says):
        loss_of(program, fake)


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
BERT = transformers.BertConfig(**TINY, intermediate_size=16, vocab_size=50)
GPT2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=32)
T5 = transformers.T5Config(
    d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50, n_positions=32
)
T5.decoder_start_token_id = T5.pad_token_id = 0
VIT = transformers.ViTConfig(**TINY, intermediate_size=16, image_size=32, patch_size=16)


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (transformers.AutoModelForCausalLM, {"input_ids": (3, 7), "labels": (3, 7)}),
        (transformers.AutoModelForSequenceClassification, {"labels": (3,)}),
        pytest.param(
            transformers.AutoModelForTokenClassification,
            {"labels": (3, 7)},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            transformers.AutoModelForMaskedLM,
            {"attention_mask": (3, 7), "labels": (3, 7)},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            transformers.AutoModelForQuestionAnswering,
            {"start_positions": (3,)},
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            transformers.AutoModelForMultipleChoice,
            {"input_ids": (3, 2, 7), "labels": (3,)},
            marks=pytest.mark.nightly,
        ),
        (transformers.AutoModelForSeq2SeqLM, {"input_ids": (3, 7), "labels": (3, 7)}),
        (transformers.AutoModelForImageClassification, {"pixel_values": (3, 3, 32, 32)}),
    ],
)
def test_models_of_transformers_have_a_batch_and_a_loss(model: Any, shapes: dict[str, Any]) -> None:
    configs = {"CausalLM": GPT2, "Seq2SeqLM": T5, "ImageClassification": VIT}
    config = next((c for word, c in configs.items() if model.__name__.endswith(word)), BERT)
    built = model.from_config(config)
    batch = default_batch(built, 7).make(3)
    assert {name: tuple(batch[name].shape) for name in shapes} == shapes
    assert built(**batch).loss.requires_grad


def test_the_length_of_samples_is_the_models_own_and_said() -> None:
    batch = default_batch(transformers.AutoModelForCausalLM.from_config(GPT2), None)
    assert batch.make(1)["input_ids"].shape == (1, 32)
    assert "each sample has 32 tokens, the most that GPT2LMHeadModel takes" in batch.note


def test_files_of_the_persons_are_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_layers.py").write_text("WIDTH = 3")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):  # the second time its compiled form is read
        files = FilesRead()
        importlib.import_module("my_layers")
        importlib.import_module("wave")
        (tmp_path / "config.json").read_bytes()
        (tmp_path / "out.txt").write_text("written, not read")
        heard = files.report() or ()
        monkeypatch.delitem(sys.modules, "my_layers")
        monkeypatch.delitem(sys.modules, "wave")
        assert {Path(file.path).name for file in heard} == {"my_layers.py", "config.json"}
        assert {file.size for file in heard} == {9, 2}
        assert [file.digest for file in heard] == [trace_cache.digest_of(f.path) for f in heard]
    monkeypatch.setattr(files_read, "_MOST_FILES", 1)
    files = FilesRead()
    for name in ("config.json", "my_layers.py"):
        (tmp_path / name).read_bytes()
    assert files.report() is None


def test_a_checkpoint_is_not_read(tmp_path: Any) -> None:
    transformers.AutoModelForCausalLM.from_config(GPT2).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    cell = f"""
    from transformers import AutoModelForSequenceClassification
    model = AutoModelForSequenceClassification.from_pretrained(
        {str(tmp_path)!r}, num_labels=5, dtype="bfloat16", attn_implementation="eager"
    )
    assert not model.training
    model.config.pad_token_id = 0
    """
    before = transformers.PreTrainedModel.from_pretrained
    try:
        program, fake = ran(cell, sequence_length=5)
    finally:
        transformers.PreTrainedModel.from_pretrained = before
    assert program.model.num_labels == 5
    assert {p.dtype for p in program.model.parameters()} == {torch.bfloat16}
    loss_of(program, fake)


def test_a_model_built_on_the_meta_device_is_planned() -> None:
    on_meta = "with torch.device('meta'):\n    model = nn.Sequential(nn.Linear(4, 700_000))\n"
    program, fake = ran(HEAD + on_meta + BATCH + LOSS)
    loss_of(program, fake)
    assert {p.device.type for p in program.model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        ("model(batch[0]).detach().numpy().sum()", "no values, so what a tensor holds"),
        ("model(batch[0]).sum().backward()", "calls backward"),
    ],
)
def test_a_loss_that_does_too_much_is_told_so(loss_fn: str, says: str) -> None:
    program, fake = ran(HEAD + NET + BATCH + f"def loss_fn(model, batch): return {loss_fn}")
    with pytest.raises((FsdpError, NoValuesError), match=says):
        loss_of(program, fake)


def test_a_batch_of_the_planners_that_a_model_does_not_take_is_told_with_the_error() -> None:
    cell = "from transformers import T5Config, T5ForConditionalGeneration\n" + (
        "model = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1))"
    )
    program, fake = ran(cell, sequence_length=3)
    with pytest.raises(AttributeError) as caught:  # T5 wants to be told what decoding begins with
        loss_of(program, fake)
    assert "example_batch(b)" in caught.value.__notes__[0]


def test_more_tokens_than_a_model_is_made_for_are_told() -> None:
    gpt2 = transformers.AutoModelForCausalLM.from_config(GPT2)
    assert "more than the 32 that GPT2LMHeadModel" in default_batch(gpt2, 33).note
    assert "more than" not in default_batch(gpt2, 32).note


def test_views_of_known_values_take_no_memory() -> None:
    with PlanningMode(), known_values():
        known = torch.zeros(4, 4)
        for view in (known.view(16), known.expand(3, 4, 4), known[:2], *known.split(2)):
            assert view.untyped_storage()._cdata == known.untyped_storage()._cdata
            assert view.constant is not None


def test_experts_multiply_in_any_dtype() -> None:
    with PlanningMode():
        ends = torch.zeros(2, dtype=torch.int32)
        out = torch._grouped_mm(torch.zeros(6, 16), torch.zeros(2, 16, 8), offs=ends)
        assert (out.shape, out.dtype) == ((6, 8), torch.float32)


def test_views_of_copied_parameters_take_no_memory() -> None:
    program, fake = ran(HEAD + NET + "import copy\nmodel = copy.deepcopy(model)\n" + BATCH + LOSS)
    with fake:
        for parameter in program.model.parameters():
            storage = parameter.detach().untyped_storage()
            assert storage._cdata == parameter.untyped_storage()._cdata


# ---------------------------------------------------------------- mistakes


def test_a_training_cell_is_told_where_its_forward_goes() -> None:
    with pytest.raises(NameError) as caught:
        ran(HEAD + NET + "loss = model(batch).sum()")
    assert any("def loss_fn(model, batch)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("cell", ["model = Net()", NET + BATCH + LOSS.replace("[1]", "[y]")])
def test_a_name_of_another_cell_is_told_to_be_missing_here(cell: str) -> None:
    def run() -> None:
        program, _ = ran(HEAD + cell)
        program.loss_of(program.make_batch(2))

    with pytest.raises(NameError) as caught:
        run()
    assert any("without the names of other cells" in note for note in caught.value.__notes__)


def test_a_batch_that_is_the_same_for_any_number_of_samples_is_refused() -> None:
    def trace(batch: str) -> None:
        program, fake = ran(HEAD + NET + batch + LOSS, mode=PlanningMode())
        traces_of(program, [TraceVariant()], fake, wraps=["blocks"], kind="cpu")

    trace(BATCH)
    with pytest.raises(FsdpError, match=r"let the tensors of example_batch\(b\) have b samples"):
        trace(BATCH.replace("zeros(b", "zeros(8"))


def test_an_error_of_fake_tensors_is_raised_and_not_logged_too() -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        with PlanningMode(), errors_told_once(), pytest.raises(RuntimeError):
            torch.zeros(2, 11) @ torch.zeros(10, 10)
        assert not records
        assert not logger.disabled
    finally:
        logger.removeHandler(handler)


# ---------------------------------------------------------------- what a plan cannot have


def traces(cell: str, *variants: TraceVariant) -> tuple[Described, dict[Any, Any], dict[Any, str]]:
    program, fake = ran(HEAD + cell, mode=PlanningMode())
    return program, *traces_of(program, variants, fake, wraps=["blocks"], kind="cpu")


PICKY = """
class Picky(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if y.dtype == torch.bfloat16:
            raise ValueError("of bf16")
        return y
model = Picky(4, 2)
"""


def test_a_variant_that_cannot_be_traced_costs_the_others_nothing() -> None:
    fp32, bf16 = TraceVariant("fp32"), TraceVariant("bf16")
    _, alone, none = traces(PICKY + BATCH + LOSS, fp32)
    for order in ((fp32, bf16), (bf16, fp32)):
        _, found, untraced = traces(PICKY + BATCH + LOSS, *order)
        assert found == alone
        assert untraced == {bf16: "ValueError: of bf16"}
    assert not none
    with pytest.raises(ValueError, match="of bf16"):
        traces(PICKY + BATCH + LOSS, bf16)


@pytest.mark.parametrize(
    ("optimizer", "says"),
    [
        ("optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()])", "`optimizer`"),
        ("of_other = torch.optim.SGD(other.parameters())", "`of_other`"),
    ],
)
def test_parameters_that_are_trained_beside_the_model_are_refused(
    optimizer: str, says: str
) -> None:
    with pytest.raises(FsdpError, match=rf"{says} holds 2 parameters \(15 elements\) that are not"):
        ran(HEAD + "other = nn.Linear(4, 3)\n" + NET + BATCH + LOSS + optimizer)


def test_a_cell_that_asks_for_input_is_told_that_nobody_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(FsdpError, match="write the value into the cell"):
            ran(HEAD + "layers = int(input())\n" + NET + BATCH + LOSS)


def test_sparse_gradients_are_refused() -> None:
    cell = "model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))\n"
    batch = BATCH.replace("zeros(b, 4)", "zeros(b, dtype=torch.long)")
    with pytest.raises(FsdpError, match=r"the gradient of `0\.weight` is sparse.*sparse=False"):
        traces(cell + batch + LOSS, TraceVariant())


def test_memory_of_recurrent_modules_libraries_is_said_to_be_missing() -> None:
    loss = "def loss_fn(model, batch): return model(batch[0])[0].mean()\n"
    program, *_ = traces("model = nn.LSTM(4, 2)\n" + BATCH + loss, TraceVariant())
    assert any(note.startswith("memory of nn.LSTM's libraries") for note in program.notes)
