"""The first call over several ranks may be compiled, and modules that hold a process group can be deep-copied."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any

import torch
from torch import distributed as _distributed
from torch import nn

from meshflash import Layout, Mask, attention, shard, unshard
from meshflash.engine.group_context import close_contexts
from meshflash.integrations.compat.yunchang import UlyssesAttention
from meshflash.parallel import MeshAttention

dist: Any = _distributed  # the stubs of torch miss some of its exports


def check_compiled_first_calls(rank, world, group):
    """Compile the first call over a new group; assert that results and gradients match the eager call."""
    torch._dynamo.reset()
    layout = Layout.zigzag(11, world)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 11, 2, 8, generator=generator, dtype=torch.float64)

    def check_schedule(schedule, mesh):
        def step(x):
            local = shard(x, layout)
            out = attention(local, local, local, mesh=mesh, layout=layout, schedule=schedule, mask=Mask.causal())
            return unshard(out, layout)

        close_contexts()  # forget all groups, as in a new process
        plain, fast = x.clone().requires_grad_(), x.clone().requires_grad_()
        out = torch.compile(step, fullgraph=True, backend="eager")(fast)
        want = step(plain)
        assert torch.equal(out, want)
        out.square().sum().backward()
        want.square().sum().backward()
        assert fast.grad is not None
        assert plain.grad is not None
        assert torch.equal(fast.grad, plain.grad)

    check_schedule("ulysses", None)
    check_schedule("hybrid", dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("a", "b")))


def test_first_call_compiles_as_one_graph(pool):
    pool.run(2, check_compiled_first_calls)


def test_schedules_are_imported_before_the_first_call():
    """`torch.compile` cannot trace an import inside the first call."""
    code = "from meshflash import attention; from meshflash.schedules import registry; assert registry._loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def check_deepcopies(rank, world, group):
    """Assert that a deep copy has its own weights and the same group or mesh."""
    x = torch.randn(1, 4, 2, 8, generator=torch.Generator().manual_seed(rank))
    mesh = dist.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    for ranks in (group, mesh):
        model = nn.ModuleDict({"attend": MeshAttention(mesh=ranks, mask=Mask.causal()), "linear": nn.Linear(2, 2)})
        other = deepcopy(model)
        assert other["attend"] is not model["attend"]
        assert other["attend"].mesh is ranks
        assert other["linear"].weight is not model["linear"].weight
        assert torch.equal(other["attend"](x, x, x), model["attend"](x, x, x))
    ulysses = UlyssesAttention(group)
    assert torch.equal(deepcopy(ulysses)(x, x, x), ulysses(x, x, x))


def test_deepcopy_of_a_module_keeps_its_process_group(pool):
    pool.run(2, check_deepcopies)
