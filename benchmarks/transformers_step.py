"""A training step of a Hugging Face Llama: our attention beside SDPA in one process, and over ranks beside one rank.

A step is a forward and a backward with gradient checkpointing, and with the same tiled loss everywhere: whole logits
would not fit. Ranks that share a GPU get equal parts of it from MPS, and are compared with one rank of the whole GPU: a
part of it alone runs at a higher clock than all parts together. Gradients of ranks are not averaged: that is the work
of DDP or FSDP, and the same with any attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as _distributed
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.protocol import Rows, one_table
from meshflash.api import flash_attention
from meshflash.bench.cases import on_cpu
from meshflash.bench.columns import Column, milliseconds, optional
from meshflash.bench.measure import Say
from meshflash.bench.timing import synchronize
from meshflash.core.mask import Mask
from meshflash.kernels import registry
from meshflash.parallel import init_mesh
from meshflash.runtime.devices import take_device
from meshflash.runtime.mps import mps, variables
from meshflash.runtime.processes import Tell, run_ranks

dist: Any = _distributed  # torch does not declare all that it exports here

#: The shape of llama3.2-1b, and one for CPUs.
LLAMA_1B = dict(
    hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256
)
SMALL = dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=512)
#: What calls our attention without anything around it: the cost of the integration is over this.
PLAIN = "plain_attn"
OURS = "mesh_attn"
#: The largest difference of losses, relative, by dtype.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-3}


@dataclass(frozen=True)
class LlamaCase:
    """What is trained.

    Attributes:
        layers: The number of layers.
        tokens: The sequence length.
        dtype: The dtype of weights and activations.
        device: The kind of device.
    """

    layers: int
    tokens: int
    dtype: str
    device: str

    def model(self, attention: str, device: torch.device, draw_on_cpu: bool = False) -> Any:
        """Return the model with random weights, the same for every attention.

        Args:
            attention: The name of the attention for Transformers.
            device: Where it is.
            draw_on_cpu: Whether to draw the weights on the CPU, so that they are the same on any share of a GPU. What a
                GPU draws depends on how many SMs the process has.
        """
        library: Any = import_module("transformers")
        library.logging.set_verbosity_error()
        shape: dict[str, Any] = SMALL if on_cpu(self.device) else LLAMA_1B
        config = library.LlamaConfig(
            **shape, num_hidden_layers=self.layers, max_position_embeddings=self.tokens, attn_implementation=attention,
            tie_word_embeddings=True, use_cache=False, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device("cpu") if draw_on_cpu else device:
            model = library.LlamaForCausalLM(config).to(device, getattr(torch, self.dtype)).train()
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        return model

    def ids(self, device: torch.device) -> Tensor:
        """Return the token ids of a step.

        Args:
            device: Where they are.
        """
        generator = torch.Generator().manual_seed(1)
        return torch.randint(1, 500, (1, self.tokens), generator=generator).to(device)


@dataclass(frozen=True)
class StepRow:
    """The median step of one attention, or of the slowest of several ranks.

    `ratio` is its time over that of the fastest SDPA in the same process, `over_plain` over that of our attention
    without the integration. `efficiency` is the speedup over one rank, for each rank's part of the hardware.
    """

    attention: str
    ranks: int
    gpu_percent: int | None
    layers: int
    tokens: int
    dtype: str
    device: str
    ms: float
    ratio: float | None
    over_plain: float | None
    efficiency: float | None
    loss: float
    forward_ran: str
    backward_ran: str


@dataclass(frozen=True)
class _Checked:
    """The loss of a first step, and the attention that ran in it."""

    loss: float
    forward_ran: str
    backward_ran: str


def run(case: LlamaCase, ranks: int, share_gpu: bool, rounds: int, say: Say = lambda _: None) -> list[StepRow]:
    """Return the rows of one device, and with more than one rank those of one rank and of all of them.

    Args:
        case: What is trained.
        ranks: The number of ranks that share the sequence.
        share_gpu: Whether ranks share a GPU by MPS.
        rounds: The timed steps.
        say: A function that is told the progress.
    """
    rows = _one_device(case, rounds, say) if ranks == 1 else []
    if ranks > 1:
        shares = {n: 100 // n if share_gpu else None for n in (1, ranks)}
        with mps() if share_gpu else nullcontext():
            found = {n: _over_ranks(case, n, share, rounds, say) for n, share in shares.items()}
        _check({f"{n} ranks": checked.loss for n, (_, checked) in found.items()}, case.dtype)
        for n, (ms, checked) in found.items():
            efficiency = found[1][0] / ms / (n * (shares[n] or 100) / 100)
            measured: dict[str, Any] = dict(ms=ms, ratio=None, over_plain=None, efficiency=efficiency)
            rows.append(StepRow(OURS, n, shares[n], **asdict(case), **measured, **asdict(checked)))
    return rows


def _one_device(case: LlamaCase, rounds: int, say: Say) -> list[StepRow]:
    from meshflash.integrations.transformers import context_parallel, tile_loss

    device = take_device(case.device, 0)
    mesh = init_mesh(device=device.type)
    ids = case.ids(device)
    steps: dict[str, Callable[[], Tensor]] = {}
    first = None
    backends: dict[str, Any] = {"sdpa": nullcontext}
    if not on_cpu(case.device):
        backends["sdpa (cuDNN)"] = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    for name in (*backends, PLAIN, OURS):
        say(f"building the model with {name}")
        if name == PLAIN:
            _register_plain()
        model = case.model(PLAIN if name == PLAIN else "sdpa", device)
        first = first or model
        _share_weights(model, first)
        tile_loss(model)
        if name == OURS:
            context_parallel(model, mesh["cp"])
        steps[name] = partial(_step, model, ids, backends.get(name, nullcontext))
    checked = {}
    for name, step in steps.items():
        say(f"checking {name}")
        checked[name] = _checked(step, name)
    _check({name: each.loss for name, each in checked.items()}, case.dtype)
    ms: dict[str, list[float]] = {name: [] for name in steps}
    for n in range(rounds):
        for name, step in steps.items():
            say(f"{name}: step {n + 1} of {rounds}")
            synchronize(device)
            begin = time.perf_counter()
            step()
            synchronize(device)
            ms[name].append((time.perf_counter() - begin) * 1e3)
    median = {name: statistics.median(each) for name, each in ms.items()}
    fastest = min(median[name] for name in backends)
    return [
        StepRow(
            name,
            1,
            None,
            **asdict(case),
            ms=time_,
            ratio=time_ / fastest,
            over_plain=time_ / median[PLAIN],
            efficiency=None,
            **asdict(checked[name]),
        )
        for name, time_ in median.items()
    ]


def _over_ranks(case: LlamaCase, ranks: int, share: int | None, rounds: int, say: Say) -> tuple[float, _Checked]:
    """Return the median over steps of the slowest rank's milliseconds, and the first step of a rank."""
    part = {} if share is None else {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)}
    with variables(**part):
        found = run_ranks(ranks, train, case, rounds, threads=1, timeout=1800.0, listen=say)
    return statistics.median(map(max, zip(*(ms for ms, _ in found), strict=True))), found[0][1]


def train(rank: int, world: int, tell: Tell, case: LlamaCase, rounds: int) -> tuple[list[float], _Checked]:
    """Return the milliseconds of one rank's steps, and its first step.

    Args:
        rank: The rank.
        world: The number of ranks.
        tell: A function that is told the progress.
        case: What is trained.
        rounds: The timed steps.
    """
    from meshflash.integrations.transformers import context_parallel, tile_loss

    say = tell if rank == 0 else lambda _: None
    device = take_device(case.device, rank)
    mesh = init_mesh(cp=world, device=device.type)
    model = case.model("sdpa", device, draw_on_cpu=True)
    tile_loss(model)
    context_parallel(model, mesh["cp"], average_gradients=False)
    step = partial(_step, model, case.ids(device), nullcontext)
    say(f"{world} ranks: warming up")
    checked = _checked(step, OURS)
    ms = []
    for n in range(rounds):
        say(f"{world} ranks: step {n + 1} of {rounds}")
        synchronize(device)
        dist.barrier()
        begin = time.perf_counter()
        step()
        synchronize(device)
        ms.append((time.perf_counter() - begin) * 1e3)
    return ms, checked


def _checked(step: Callable[[], Tensor], name: str) -> _Checked:
    """Run a step that is not timed."""
    with registry.record_kernels() as ran:
        loss = float(step())
    return _Checked(loss, ran.names("forward") or name, ran.names("backward") or name)


def _step(model: nn.Module, ids: Tensor, backend: Callable[[], Any]) -> Tensor:
    for p in model.parameters():
        p.grad = None
    with backend():
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.detach()


def _register_plain() -> None:
    """Register our attention for one device under a name, with nothing of the integration around it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: Any = None, **_: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return flash_attention(q, k, v, mask=Mask.causal(), scale=scaling), None

    AttentionInterface.register(PLAIN, attend)
    AttentionMaskInterface.register(PLAIN, lambda **_: None)


def _share_weights(model: nn.Module, first: nn.Module) -> None:
    """Let a model use the weights of another, so that several fit beside each other."""
    if model is first:
        return
    for path, module in model.named_modules():
        other = first.get_submodule(path)
        for name, parameter in list(other.named_parameters(recurse=False)):
            setattr(module, name, parameter)


def _check(losses: dict[str, float], dtype: str) -> None:
    """Raise RuntimeError if losses differ."""
    (first, want), *others = losses.items()
    for name, loss in others:
        if not abs(loss - want) <= TOLERANCE[dtype] * abs(want):
            raise RuntimeError(f"{name} has the loss {loss:.6f}, {first} {want:.6f}")


def title(rows: Rows) -> str:
    """Return what was trained, in words.

    Args:
        rows: The rows.
    """
    row = rows[0]
    return f"A step of a Llama of {row['layers']} layers in {row['dtype']}, {row['tokens']:,} tokens"


COLUMNS = (
    Column("attention", lambda row: row["attention"]),
    Column("ranks", lambda row: str(row["ranks"])),
    Column("of the\nGPU", optional("gpu_percent", "{}%")),
    Column("step\n(ms)", lambda row: milliseconds(row["ms"])),
    Column("x time\nof SDPA", optional("ratio", "{:.3f}")),
    Column("x time\nof plain\nattention", optional("over_plain", "{:.3f}")),
    Column("efficiency", optional("efficiency", "{:.3f}")),
    Column("loss", lambda row: f"{row['loss']:.5f}"),
)
BENCHMARK = one_table("transformers", {"attention", "over_plain"}, COLUMNS, title)
