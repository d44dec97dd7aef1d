"""KERNEL: what ``%magic?`` and ``help(session.train)`` say about options; imports no IPython."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from fsdp_magic.core.options import Option, options_of
from fsdp_magic.core.specs import MAGICS

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_WIDTH = 98
_NARROWEST = 40


def options_text(spec: type[Any]) -> str:
    """Return the options of a spec as they are typed in a magic's line, aligned."""
    rows = [
        (_usage(option), _described(option, default))
        for option, default in sorted(
            _options_and_defaults(spec).values(), key=lambda pair: pair[0].flags[:1] == ("-o",)
        )  # a name for the result is the last thing that one thinks of
    ]
    return _aligned(rows)


def keywords_text(spec: type[Any], *, without: tuple[str, ...] = ()) -> str:
    """Return the options of a spec as the keywords of a function, aligned."""
    rows = [
        (f"{name}={default!r}", _described(option, None))
        for name, (option, default) in _options_and_defaults(spec).items()
        if name not in without
    ]
    return _aligned(rows)


def takes_options(
    spec: type[Any], *, without: tuple[str, ...] = ()
) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator: the options of a spec are a function's keywords, also for Tab and help.

    Args:
        spec: what the function's ``**options`` are fields of.
        without: fields that the function takes by itself, or not at all.
    """

    def decorated(function: FunctionT) -> FunctionT:
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        kinds = typing.get_type_hints(spec)
        keywords = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kinds[name]
            )
            for name, (_, default) in _options_and_defaults(spec).items()
            if name not in without
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*kept, *keywords]
        )
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = f"{text}\n\nOptions:\n{keywords_text(spec, without=without)}\n"
        return function

    return decorated


def _options_and_defaults(spec: type[Any]) -> dict[str, tuple[Option, Any]]:
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    return {name: (option, defaults[name]) for name, option in options_of(spec).items()}


def _aligned(rows: list[tuple[str, str]]) -> str:
    """Return rows of two columns; what is too long goes on under its own column."""
    width = max((len(left) for left, _ in rows), default=0)
    lines: list[str] = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, max(_NARROWEST, _WIDTH - width - 4))
        lines.append(f"  {left:<{width}}  {wrapped[0]}")
        lines.extend(f"  {'':<{width}}  {more}" for more in wrapped[1:])
    return "\n".join(lines)


def _usage(option: Option) -> str:
    if option.many:
        return f"{option.takes}…"
    takes = f"[{option.takes}]" if option.alone else option.takes
    return " ".join(filter(None, (option.flags[0], takes)))


def _described(option: Option, default: object) -> str:
    """Return the help of an option with its choices, and its default where it is a value."""
    more = [f"one of {', '.join(option.choices)}"] if len(option.choices) > 1 else []
    if option.alone:
        more.append(f"{option.alone} where none is given")
    if default is not None and not isinstance(default, (bool, tuple)):
        more.append(f"default {default}")
    return f"{option.help} ({'; '.join(more)})" if more else option.help


def magic_help(magic: str, first: str | None) -> str:
    """Return what ``%magic?`` shows.

    Args:
        magic: as it is typed, with its percent signs.
        first: a line that says what it does.
    """
    about, example = _MAGICS[magic]
    options = options_text(MAGICS[magic]) or "  none"
    indented = textwrap.indent(inspect.cleandoc(example), "    ")
    parts = [first, inspect.cleandoc(about), f"Options:\n{options}", f"Example:\n{indented}"]
    return "\n\n".join(part for part in parts if part) + "\n"


_MAGICS: dict[str, tuple[str, str]] = {
    "%fsdp_init": (
        """
        The engines live until %fsdp_shutdown, or until the kernel ends. Typed again, it finds the
        session that is running. It returns the session: session = %fsdp_init
        The options from --strategy on are what %%fsdp_model takes for every model of the session
        unless it is told otherwise.
        """,
        "%fsdp_init -n 2 --memory-limit 2GiB",
    ),
    "%%fsdp": (
        """
        What the ranks print is labelled, equal lines once. Cells find rank, world_size, dp_rank,
        dp_size, device and fsdp.
        """,
        """
        %%fsdp --ranks 0
        print(rank, world_size)
        """,
    ),
    "%%fsdp_model": (
        """
        Write the model and its optimizer as for one device: modules are sharded in place, and
        optimizers follow them. What %fsdp_init was told stands for every model; a word without a
        value is taken back for one by its --no-: --no-compile, --no-cpu-offload.
        """,
        """
        %%fsdp_model --strategy full_shard --precision bf16 --activation-checkpointing
        model = AutoModelForCausalLM.from_config(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        """,
    ),
    "%%fsdp_train": (
        """
        The cell is the forward pass of one micro-batch, which it finds as `batch`. Backward,
        accumulation, clipping, optimizer and scheduler steps are done for it. It returns a Run:
        run.losses, run.grad_norms, run.metrics. Interrupt the kernel to stop after the step.
        A number may be given by its name on the engines: --steps n_steps
        """,
        """
        %%fsdp_train --data train_data --steps 100 --accumulate 4
        loss = model(**batch).loss
        """,
    ),
    "%%fsdp_eval": (
        """
        The cell may bind `loss`, `metrics` (a dict of numbers) and `collect` (a dict with a row
        per sample). It returns .loss, .metrics and .collected over all ranks.
        """,
        """
        %%fsdp_eval --data val_data
        logits = model(batch[0])
        metrics = {"accuracy": (logits.argmax(-1) == batch[1]).float().mean()}
        collect = {"prediction": logits.argmax(-1)}
        """,
    ),
    "%fsdp_compare": (
        """
        Each strategy begins from the weights, the optimizer's state and the place in the data
        that are there now; afterwards everything is as before. Memory is counted beyond what a
        rank holds without the model. It returns the comparison: result = %fsdp_compare;
        result["ddp"] has losses, times and peaks.
        """,
        "%fsdp_compare --strategies full_shard,shard_grad_op,ddp+bf16 --steps 20",
    ),
    "%%fsdp_tune": (
        """
        Whole steps of one size after the other run on every rank, and each time everything is put
        back: weights, optimizers, random states, the place in the data. A size fits if it fits on
        every rank with the margin left free. The next %%fsdp_train on the same data takes the
        size that was found, unless it says --micro-batch-size.
        %fsdp_tune, without a cell, tries the last one, trained or tuned, with its options; those
        that are given are taken instead. It returns what was found: tuned.micro_batch_size,
        tuned.probes, tuned.table; tuned.choose(4) hands another size on.
        """,
        """
        %%fsdp_tune --data train_data --max 64
        loss = model(**batch).loss
        """,
    ),
    "%%fsdp_plan": (
        """
        The cell binds `model` and, if it likes, `optimizer` (else AdamW), `example_batch(b)` and
        `loss_fn(model, batch)`; models of transformers have defaults for both. It runs in a
        process of its own, without weights, without a GPU and without the names of other cells.
        %fsdp_plan, without a cell, plans the session's model, data and last training cell. It
        returns the plan: plan.max_micro_batch_size["full_shard"], plan.peak_bytes("full_shard", 8),
        plan.show("ddp"), plan.show_terms() with the source of every figure.
        """,
        """
        %%fsdp_plan --gpu-memory 24GiB --world-size 2 --seq-len 128
        from transformers import AutoConfig, AutoModelForCausalLM
        config = AutoConfig.from_pretrained("./my-model")
        model = AutoModelForCausalLM.from_config(config)
        """,
    ),
    "%fsdp_shards": (
        """
        How the model is spread, its units by name and what it computes in; of each block the
        bytes that every rank holds, and of each tensor in it the rows.
        """,
        "%fsdp_shards model",
    ),
    "%fsdp_status": (
        "The panel of the last training run is shown again beneath it.",
        "%fsdp_status",
    ),
    "%fsdp_console": (
        """
        Type the command in a terminal of this machine. The console waits while a cell runs; what
        it binds, cells find; Ctrl-D leaves it.
        """,
        "%fsdp_console --rank 1",
    ),
    "%fsdp_push": (
        "Each must be something that can be pickled.",
        "%fsdp_push vocabulary",
    ),
    "%fsdp_pull": (
        "A sharded tensor is gathered, and comes whole, on the CPU, detached.",
        "%fsdp_pull model.lm_head.weight --rank 0",
    ),
    "%fsdp_restart": (
        "Variables and models on the engines are gone afterwards.",
        "%fsdp_restart",
    ),
    "%fsdp_shutdown": (
        "Nothing of them is left, on any device. %fsdp_init starts new ones.",
        "%fsdp_shutdown",
    ),
}
"""What every magic's help says beneath its first line, and how it is used."""
