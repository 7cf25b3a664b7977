"""A first call over ranks may be a compiled one, and modules that hold a process group can be copied."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any

import torch
from torch import distributed as _distributed
from torch import nn

from meshflash import Layout, Mask, attention, shard, unshard
from meshflash.engine.group_context import close_all
from meshflash.integrations.compat.yunchang import UlyssesAttention
from meshflash.parallel import MeshAttention

dist: Any = _distributed  # torch does not declare all that it exports here


def compiled_before_anything_else(rank, world, group):
    torch._dynamo.reset()
    layout = Layout.zigzag(11, world)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 11, 2, 8, generator=generator, dtype=torch.float64)

    def once(schedule, mesh):
        def step(x):
            mine = shard(x, layout)
            out = attention(mine, mine, mine, mesh=mesh, layout=layout, schedule=schedule, mask=Mask.causal())
            return unshard(out, layout)

        close_all()  # no group is known, as in a new process
        plain, fast = x.clone().requires_grad_(), x.clone().requires_grad_()
        out = torch.compile(step, fullgraph=True, backend="eager")(fast)
        want = step(plain)
        assert torch.equal(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
        assert fast.grad is not None
        assert plain.grad is not None
        assert torch.equal(fast.grad, plain.grad)

    once("ulysses", None)
    once("hybrid", dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b")))


def test_first_call_compiles_as_one_graph(pool):
    pool.run(2, compiled_before_anything_else)


def test_schedules_are_imported_before_the_first_call():
    """A compiler that traces it cannot import them."""
    code = "from meshflash import attention; from meshflash.schedules import registry; assert registry._loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def copied(rank, world, group):
    x = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(rank))
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for given in (group, mesh):
        model = nn.ModuleDict({"attend": MeshAttention(mesh=given, mask=Mask.causal()), "linear": nn.Linear(2, 2)})
        other = deepcopy(model)
        assert other["attend"] is not model["attend"]
        assert other["attend"].mesh is given
        assert other["linear"].weight is not model["linear"].weight
        assert torch.equal(other["attend"](x, x, x), model["attend"](x, x, x))
    theirs = UlyssesAttention(group)
    assert torch.equal(deepcopy(theirs)(x, x, x), theirs(x, x, x))


def test_deepcopy_of_a_module_uses_the_same_ranks(pool):
    pool.run(2, copied)
