"""Units that return views: what is written into them, and that torch has nothing to warn of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from loops import check_equal, norm_of

from fsdp_magic.notebook.session import Session

BUILD = """
import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.keep = nn.Dropout(0.0)
    def forward(self, x):
        flat = torch.addmm(self.bias, x.reshape(-1, 4), self.weight)
        return self.keep(flat.view(x.shape)), x[0], flat.t()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer(), Layer()])
    def forward(self, x):
        h, _, _ = self.layers[0](x)
        h += x
        k, given, columns = self.layers[1](h.tanh())
        k += h * 2
        k *= 1.5
        k[0] = given * 2
        out, _, _ = self.layers[2](k.tanh())
        out *= h
        return out.pow(2).mean() + columns.sin().sum()

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = torch.randn(2, 3, 4)
torch.set_default_dtype(torch.float32)
"""


def loop(names: dict[str, Any]) -> Iterator[tuple[float, float]]:
    model, optimizer = names["model"], names["optimizer"]
    for _ in range(3):
        loss = model(names["x"])
        loss.backward()
        yield loss.item(), norm_of(*model.parameters())
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def warnings_are_errors(session: Session) -> Iterator[None]:
    """Have what torch says of views and of earlier names of its functions raised inside."""
    session.run(
        "import warnings\n"
        "caught = warnings.catch_warnings()\n"
        "caught.__enter__()\n"
        "warnings.filterwarnings('error', message='.*(view tensor|is deprecated)')",
        show=False,
    )
    try:
        yield
    finally:
        session.run("caught.__exit__(None, None, None)", show=False)


@pytest.mark.parametrize("strategy", ["full_shard", "zero1"])
def test_a_view_that_is_written_into_trains_as_in_one_process(
    session: Session, strategy: str
) -> None:
    with warnings_are_errors(session):
        check_equal(session, BUILD, "loss = model(x)", loop, strategy=strategy, steps=3)
