"""Everything that steps could change on engines, as digests: noted, and compared bit for bit.

Digests, not copies: they take no memory of a rank that is nearly full.
"""

from __future__ import annotations

from fsdp_magic.notebook.session import Session

BUILT = """
import torch
import torch.nn as nn
torch.manual_seed(1)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.embed(x)
        for each in self.blocks:
            x = x + each(x)
        return self.head(x) * self.scale

    def score(self, x):
        return self.scale * x.sum()

model = Net().double()
model.scale.no_decay = True
model.blocks[1][1].bias.requires_grad_(False)
model.register_forward_hook(lambda module, args, out: out)
teacher = Net().double().eval()
free = torch.ones(3, dtype=torch.float64, requires_grad=True)
optimizer = torch.optim.AdamW(
    [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
     {"params": [p for p in model.parameters() if p.ndim < 2] + [free], "lr": torch.tensor(0.01)}],
    lr=0.02,
)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
generator = torch.Generator().manual_seed(2)
data = list(torch.randint(0, 11, (90,), generator=generator))
kept = list(model.parameters())
"""
"""A model with one of each that can get lost: what it holds moves, is tied, marked, frozen."""
CELL = """
assert model.scale.no_decay  # marks and what is frozen are as the person left them, also inside
with torch.no_grad():
    target = teacher(batch)
loss = (model(batch) - target).pow(2).mean() + (free - 0.3).pow(2).mean()
"""
"""One step of it."""

_NOTE = """
import builtins

def _install():
    import hashlib, os, random, types, numpy, torch
    from torch import nn
    from fsdp_magic.engine.reachable import reachable

    def digest(value):
        if isinstance(value, torch.Tensor):
            local = value.to_local() if hasattr(value, "to_local") else value
            flat = local.detach().contiguous().flatten().view(torch.uint8)
            return (str(value.dtype), tuple(value.shape), type(value).__name__,
                    hashlib.sha256(flat.numpy().tobytes()).hexdigest())
        if isinstance(value, dict):
            return {str(name): digest(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [digest(item) for item in value]
        return repr(value)

    def leaf(p):
        gradient = p.grad is not None and digest(p.grad)
        return id(p), digest(p), p.requires_grad, gradient, list(vars(p))

    def module(m):
        plain = {k: id(v) for k, v in vars(m).items() if not isinstance(v, dict)}
        inner = {k: [(str(n), id(x)) for n, x in v.items()]
                 for k, v in vars(m).items() if isinstance(v, dict)}
        return [str(type(m)), plain, inner]

    def optimizer(o):
        return {
            "state": [(id(k), id(s), {n: (id(v) if isinstance(v, torch.Tensor) else 0, digest(v))
                              for n, v in s.items()} if isinstance(s, dict) else digest(s))
                      for k, s in o.state.items()],
            "groups": [(id(g), [id(p) for p in g["params"]],
                        {k: digest(v) for k, v in g.items() if k != "params"})
                       for g in o.param_groups],
        }

    def everything(names):
        engine = builtins._fsdp_magic_call.__self__
        # a test's own switches and functions may change
        own = (bool, types.FunctionType, types.MethodType, types.ModuleType)
        mine = {n: v for n, v in names.items()
                if not n.startswith("_") and n not in ("In", "Out", "exit", "quit")
                and not isinstance(v, own)}
        modules = list(reachable(mine, nn.Module).values())
        found = {f"name {n}": id(v) for n, v in mine.items()}
        found |= {f"tensor {n}": leaf(v) for n, v in mine.items() if isinstance(v, torch.Tensor)}
        for number, each in enumerate(modules):
            found |= {f"{number} module {n}": module(m) for n, m in each.named_modules()}
            found |= {f"{number} parameter {n}": leaf(p) for n, p in each.named_parameters()}
            found |= {f"{number} buffer {n}": (id(b), digest(b)) for n, b in each.named_buffers()}
            found |= {f"{number} mode {n}": m.training for n, m in each.named_modules()}
        for number, each in enumerate(reachable(mine, torch.optim.Optimizer).values()):
            found |= {f"optimizer {number} {k}": v for k, v in optimizer(each).items()}
        kind = torch.optim.lr_scheduler.LRScheduler
        for number, each in enumerate(reachable(mine, kind).values()):
            found[f"scheduler {number}"] = digest(each.state_dict())
        found |= {
            "torch's random state": digest(torch.get_rng_state()),
            "python's random state": random.getstate(),
            "numpy's random state": str(numpy.random.get_state()),
            "training's random state": digest(engine.randomness.state),
            "scaler": digest(engine.scaler.state_dict()),
            "counters": (engine.steps, engine.epoch),
            "models": [(n, id(m)) for n, m in engine.models.items()],
            "places": [(c.place.epoch, c.place.consumed, c.place.unit)
                       for c in engine.position._cursors if c.place.consumed or c.place.epoch],
            "marks": len(engine.position._marks),
            "kept": engine.comparison is None,
            "threads of torch": torch.get_num_threads(),
            "gradients are on": torch.is_grad_enabled(),
            "directory": os.getcwd(),
        }
        return found

    builtins.everything_of = everything

_install()
del _install
builtins.everything_noted = builtins.everything_of(globals())
"""
_COMPARE = """
now = __import__("builtins").everything_of({n: v for n, v in globals().items() if n != "now"})
noted = __import__("builtins").everything_noted
gone = {"name noted", "name now"}
print(sorted(n for n in (now.keys() | noted.keys()) - gone if now.get(n) != noted.get(n)))
del now, noted, gone
"""


def note(session: Session) -> None:
    """Note everything that steps could change, on every rank."""
    session.run(_NOTE, show=False)


def assert_as_before(session: Session) -> None:
    """Check that everything is as it was noted: content, and every object that holds it."""
    said = session.run(_COMPARE, show=False)
    changed = [each.stdout.strip() for each in said]
    assert changed == ["[]"] * session.world_size, f"changed on each rank: {changed}"
