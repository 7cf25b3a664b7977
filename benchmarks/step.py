"""One training step of a GPT on one device: its time and memory, beside the sum of its kernels' own times.

The kernels are timed alone, in the shapes of the step, and counted as often as the step runs them. What the step takes
beyond their sum is overhead: gathers and casts of weights, launches, allocations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.protocol import Benchmark, Rows
from meshflash.api import flash_attention
from meshflash.bench.columns import Column, Row, markdown, terminal
from meshflash.bench.timing import interleaved, synchronize, watched
from meshflash.core.mask import Mask
from meshflash.kernels import registry
from meshflash.models.gpt import GPT, PRESETS, GPTConfig
from meshflash.models.layers import apply_rotary, rotary_cos_sin, rotary_frequencies
from meshflash.parallel import accumulate, clip_grad_norm, cross_entropy_sum, init_mesh, parallelize, shard_batch
from meshflash.runtime.devices import take_device

Call = Callable[[], Any]

#: Tokens of the first step, which compiles kernels and allocates the optimizer's state.
FIRST_TOKENS = 8192
#: A step of more seconds than this runs once, for its memory and its time.
LONG_SECONDS = 10.0


@dataclass(frozen=True)
class Setup:
    """The model, the sequence length, how weights are sharded, and which activations are checkpointed."""

    preset: str = "tiny"
    tokens: int = 1024
    layers: int | None = None
    dim: int | None = None
    mode: str | None = "full"
    activation_checkpointing: str | None = None
    offload: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    kernel: str = "auto"
    offload_activations: bool = False
    tiles: int = 1

    @property
    def config(self) -> GPTConfig:
        """The sizes of the preset, but for those that were given."""
        if self.preset not in PRESETS:
            raise ValueError(f"preset={self.preset!r}: expected one of {', '.join(PRESETS)}")
        config = PRESETS[self.preset]()
        if self.dim is not None:
            config = replace(config, dim=self.dim, hidden=4 * self.dim, head_dim=self.dim // config.heads)
        return config if self.layers is None else replace(config, layers=self.layers)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of computation; master weights are float32."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True)
class Part:
    """A kernel of the step: how often it runs, and the milliseconds of one run."""

    name: str
    times: int
    ms: float


@dataclass(frozen=True)
class Step:
    """The milliseconds of a step, of all its kernels and of the plain model; its memory, and the attention that ran."""

    setup: Setup
    forward_ran: str
    backward_ran: str
    weights: int
    ms: float
    plain_ms: float | None
    kernels_ms: float | None
    ratio: float | None
    tflops: float
    peak_bytes: int
    loss: float
    parts: tuple[Part, ...]


def run(
    setup: Setup,
    rounds: int,
    plain: bool = False,
    parts: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> Step:
    """Time a step of the model as `parallelize` lays it out on this device.

    Args:
        setup: The model and how it runs.
        rounds: The number of samples; their median counts.
        plain: Whether the model without `parallelize` is timed too, interleaved with it.
        parts: Whether the kernels of the step are timed. Without them a long step runs once.
        say: A function that is called with progress messages.
    """
    device = take_device(setup.device, 0)
    mesh, config, half = init_mesh(device=setup.device), setup.config, setup.compute_dtype != torch.float32
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocabulary, (1, setup.tokens), generator=generator).to(device)
    say("building the model")

    def trainer(mode: str | None, offload: bool) -> Callable[..., Tensor]:
        with torch.device("meta"):
            model: Any = GPT(config)
        for block in model.layers:
            block.self_attn.attend.options["kernel"] = setup.kernel
        dtype = setup.compute_dtype if half else None
        model = parallelize(
            model,
            mesh,
            mode=mode,
            activation_checkpointing=setup.activation_checkpointing,
            compute_dtype=dtype,
            offload=offload,
            offload_activations=setup.offload_activations,
            tiles=setup.tiles,
        )
        model.to_empty(device="cpu" if offload else device)
        model.init_weights()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        batch = shard_batch(tokens, mesh)

        def step(batch: Mapping[str, Any] = batch) -> Tensor:
            told = accumulate(model, [batch], mesh)
            clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return told.loss

        return step

    step = trainer(setup.mode, setup.offload)
    say("first step")
    step(shard_batch(tokens[:, :FIRST_TOKENS], mesh))
    synchronize(device)
    say("watching memory")
    begin = time.perf_counter()
    with registry.record_kernels() as ran:
        seen = watched(step, device)
    seconds = time.perf_counter() - begin
    peak, loss = seen.peak_bytes + _held(device), float(seen.result)
    del seen
    say("timing steps")
    steps = {"step": step}
    if plain:
        steps["plain"] = trainer(None, False)
        steps["plain"]()
    once = not parts and not plain and seconds > LONG_SECONDS
    ms = {"step": 1e3 * seconds} if once else interleaved(steps, device, rounds)
    found: list[Part] = []
    if parts:
        found = _parts(setup, config, device, rounds, say)
        found.append(Part("clip and AdamW", 1, _update(config, device, rounds)))
    total = sum(part.times * part.ms for part in found) if parts else None
    return Step(
        setup, ran.names("forward"), ran.names("backward"),
        config.num_parameters, ms["step"], ms.get("plain"), total, None if total is None else total / ms["step"],
        config.flops(setup.tokens) / ms["step"] / 1e9, peak, loss, tuple(found),
    )  # fmt: skip


def _meta(config: GPTConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def _held(device: torch.device) -> int:
    """Return the bytes of weights and of the optimizer's state."""
    module: Any = torch.get_device_module(device) if device.type != "cpu" else None
    return int(module.memory_allocated(device)) if module is not None else 0


def _parts(
    setup: Setup, config: GPTConfig, device: torch.device, rounds: int, say: Callable[[str], None]
) -> list[Part]:
    """Time every kernel of forward and backward alone."""
    assert config.head_dim is not None
    t, e, d, dtype = setup.tokens, config.dim, config.head_dim, setup.compute_dtype
    q, k, h = config.heads * d, config.kv_heads * d, config.hidden
    forwards = config.layers * (1 if setup.activation_checkpointing is None else 2)
    parts: list[Part] = []

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).mul_(0.1).requires_grad_()

    def timed(name: str, function: Callable[..., Tensor], inputs: list[Tensor], ahead: int, back: int) -> None:
        say(f"timing {name}")
        out = function(*inputs)
        calls: dict[str, Call] = {}
        if ahead:
            calls["forward"] = partial(function, *inputs)
        if back:
            grad = torch.randn_like(out)
            calls["backward"] = lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
        for call in calls.values():
            call()
        found = interleaved(calls, device, rounds)
        times = {"forward": ahead, "backward": back}
        parts.extend(Part(f"{name}, {direction}", times[direction], ms) for direction, ms in found.items())

    # (tokens, input size, output size): number of forward and of backward runs
    linears: dict[tuple[int, int, int], tuple[int, int]] = {}
    tile, hidden, down = _in_tiles(setup, forwards)
    for shape, ahead, back in (
        *(((t, *shape), forwards, config.layers) for shape in ((e, q), (e, k), (e, k), (q, e))),
        *(((tile, e, h), hidden, config.layers * setup.tiles) for _ in range(2)),
        ((tile, h, e), down, config.layers * setup.tiles),
    ):
        before = linears.get(shape, (0, 0))
        linears[shape] = before[0] + ahead, before[1] + back
    for (tokens, inside, outside), (ahead, back) in linears.items():
        some = "" if tokens == t else f" of {tokens} tokens"
        inputs = [new(1, tokens, inside), new(outside, inside)]
        timed(f"linear {inside} to {outside}{some}", functional.linear, inputs, ahead, back)
    attend = partial(flash_attention, mask=Mask.causal(), kernel=setup.kernel)
    again = forwards if setup.activation_checkpointing == "full" else config.layers
    heads = [new(1, t, n, d) for n in (config.heads, config.kv_heads, config.kv_heads)]
    timed("attention", attend, heads, again, config.layers)
    norm = partial(_norm, eps=config.norm_eps)
    timed("RMSNorm", norm, [new(1, t, e), new(e)], 2 * forwards + 1, 2 * config.layers + 1)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = rotary_cos_sin(torch.arange(t, device=device), rotary_frequencies(d, config.theta, config.scaling), wide)
    rotate = partial(_rotated, cos=cos, sin=sin)
    timed("rotary, queries", rotate, [new(1, t, config.heads, d)], forwards, config.layers)
    timed("rotary, keys", rotate, [new(1, t, config.kv_heads, d)], forwards, config.layers)
    timed("SwiGLU", _gated, [new(1, tile, h), new(1, tile, h)], hidden, config.layers * setup.tiles)
    timed("residual", torch.add, [new(1, t, e), new(1, t, e)], forwards + config.layers, 0)
    labels = torch.randint(config.vocabulary, (1, t), device=device)
    loss = partial(cross_entropy_sum, labels=labels)
    timed("loss and its gradients", loss, [new(1, t, e), new(config.vocabulary, e)], 1, 1)
    timed("embedding", lambda w: functional.embedding(labels, w), [new(config.vocabulary, e)], 1, 1)
    return parts


def _in_tiles(setup: Setup, forwards: int) -> tuple[int, int, int]:
    """Return the tokens of an MLP's tile, and how often the up and the down projections of all tiles run.

    The recomputation of a checkpointed block stops once all saved tensors exist: before its last GEMM. A tiled MLP
    recomputes its hidden units in its own backward, so that of its block stops before the MLP.
    """
    layers = setup.config.layers
    if setup.tiles == 1:
        return setup.tokens, forwards, layers
    return -(-setup.tokens // setup.tiles), 2 * layers * setup.tiles, layers * setup.tiles


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return apply_rotary(x, cos, sin).to(x.dtype)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def _update(config: GPTConfig, device: torch.device, rounds: int) -> float:
    """Return the milliseconds of gradient clipping and AdamW on as many float32 weights."""
    model = nn.ParameterList(torch.zeros(p.shape, device=device) for p in _meta(config).parameters())
    for p in model:
        p.grad = torch.ones_like(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        clip_grad_norm(model, 1.0)
        optimizer.step()

    update()
    return interleaved({"update": update}, device, rounds)["update"]


KERNELS = (
    Column("kernel", "name", is_text=True),
    Column("times", "times"),
    Column("ms each", lambda row: f"{row['ms']:.3f}"),
    Column("ms", lambda row: f"{row['times'] * row['ms']:.1f}"),
)
TOTALS = (
    Column("", "name", is_text=True),
    Column("ms", lambda row: f"{row['ms']:.1f}"),
    Column("of the step", "share"),
)


def title(rows: Rows) -> str:
    """Return the model in words."""
    setup = rows[0]["setup"]
    return f"{setup['preset']}, {setup['tokens']:,} tokens, {setup['dtype']}, on {setup['device']}"


def tables(rows: Rows) -> list[Table]:
    """Return the kernels of the step by their total time, and the step beside their sum."""
    total = terminal(f"{rows[0]['weights']:,} weights, loss {rows[0]['loss']:.3f}", TOTALS, _totals(rows[0]))
    return [terminal(title(rows), KERNELS, _kernels(rows[0])), total] if rows[0]["parts"] else [total]


def _kernels(row: Row) -> Rows:
    return sorted(row["parts"], key=lambda part: -part["times"] * part["ms"])


def _totals(row: Row) -> Rows:
    found: Rows = []
    if row["kernels_ms"] is not None:
        found.append({"name": "its kernels", "ms": row["kernels_ms"], "share": f"{row['ratio']:.3f}"})
    peak = f"{row['tflops']:.1f} TFLOP/s, peak {row['peak_bytes'] / 2**30:.2f} GiB"
    found.append({"name": "the step", "ms": row["ms"], "share": peak})
    if row["plain_ms"] is not None:
        found.append({"name": "the plain model", "ms": row["plain_ms"], "share": f"{row['plain_ms'] / row['ms']:.3f}"})
    return found


BENCHMARK = Benchmark(
    name="step",
    keys=frozenset({"setup", "parts", "kernels_ms"}),
    tables=tables,
    markdown=lambda rows: f"{markdown(KERNELS, _kernels(rows[0]))}\n\n{markdown(TOTALS, _totals(rows[0]))}",
    title=title,
)
