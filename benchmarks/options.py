"""Options that the commands of `python -m benchmarks` share, as groups: one parameter of a command, several options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from meshflash.bench.record import Recorder
from meshflash.cli.bench_options import DTYPES, Batch, Device, Dim, KvHeads, OneMask, Output, Plot
from meshflash.cli.outputs import writable

if TYPE_CHECKING:  # torch is imported once a command runs, so that help answers at once
    from meshflash.bench.cases import Case

#: The records that docs/benchmarks.md shows; they are tracked by git.
RESULTS = Path(__file__).parent / "results"
SUITS = "by default what suits the device"

MaybeKernels = Annotated[
    list[str] | None,
    typer.Option(
        help='A kernel, "auto", "torch sdpa", "flex" or "standard"; repeat. By default all that the table needs.'
    ),
]
Nproc = Annotated[int, typer.Option("--nproc", "-n", min=2, help="Ranks.")]
OneDtype = Annotated[str | None, typer.Option(help=f"{DTYPES}; bfloat16 on GPUs and float32 on CPUs by default.")]
Schedules = Annotated[list[str], typer.Option(help="A schedule; repeat for several.")]
Tokens = Annotated[int | None, typer.Option(min=1, help=f"Sequence length; {SUITS}.")]


@dataclass(frozen=True)
class ShapeOptions:
    """The case of a benchmark of attention, but for its number of tokens."""

    mask: OneMask = "causal"
    batch: Batch = 1
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads.")] = 8
    kv_heads: KvHeads = None
    dim: Dim = 64
    dtype: OneDtype = None
    device: Device = None

    def case(self, tokens: int, device: str, heads: int = 8, deterministic: bool = False) -> Case:
        """Return the case of this many tokens on a device.

        Args:
            tokens: The sequence length.
            device: The device that was picked.
            heads: The number of query heads if none was given.
            deterministic: Whether our kernels run in their deterministic mode.
        """
        from meshflash.bench.cases import Case, pick_dtype

        heads, dtype = self.heads or heads, pick_dtype(self.dtype, device)
        return Case(
            tokens, self.batch, heads, self.kv_heads or heads, self.dim, self.mask, dtype, device, deterministic
        )


@dataclass(frozen=True)
class ModelOptions:
    """The sizes of the GPT that a benchmark trains."""

    layers: Annotated[int | None, typer.Option(min=1, help=f"Layers of the model; {SUITS}.")] = None
    dim: Annotated[int | None, typer.Option(min=1, help=f"Dim of the model; {SUITS}.")] = None
    heads: Annotated[int | None, typer.Option(min=1, help=f"Heads; {SUITS}.")] = None
    vocabulary: Annotated[int | None, typer.Option(min=2, help=f"Size of the vocabulary; {SUITS}.")] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16, with float32 weights; bfloat16 on GPUs, float32 on CPUs by default."),
    ] = None
    device: Device = None

    @property
    def sizes(self) -> dict[str, int | None]:
        """The sizes by name; None for those that were not given."""
        return dict(layers=self.layers, dim=self.dim, heads=self.heads, vocabulary=self.vocabulary)


@dataclass(frozen=True)
class RecordOptions:
    """Where a record is written or read, and how it is shown."""

    output: Output = None
    update: Annotated[bool, typer.Option("--update", help="Replace the tracked record in benchmarks/results.")] = False
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False
    source: Annotated[
        Path | None, typer.Option("--from", exists=True, help="Show this record again instead of measuring.")
    ] = None

    @property
    def picture(self) -> Path | None:
        """The plot to write, for commands that draw one."""
        return None

    def recorder(self, name: str) -> Recorder:
        """Return the recorder of a run; refuse, before anything is measured, paths that cannot be written.

        `name` is that of the tracked record without its suffix. Without --update and --output no record is written.
        """
        if self.output is not None and self.update:
            raise typer.BadParameter("--output and --update name two records; give one of them")
        return Recorder(writable(RESULTS / f"{name}.json" if self.update else self.output, self.picture))

    def record(self, name: str, run: Callable[[], Iterable[Any]]) -> Recorder:
        """Return the recorder of a run of one case; `run` gives its rows."""
        found = self.recorder(name)
        found.add(run())
        return found


@dataclass(frozen=True)
class PlotOptions(RecordOptions):
    """The options of a record that is also drawn."""

    plot: Plot = None

    @property
    def picture(self) -> Path | None:
        """The plot to write."""
        return self.plot


#: Groups with their usual defaults.
SHAPE, MODEL, RECORD, RECORD_AND_PLOT = ShapeOptions(), ModelOptions(), RecordOptions(), PlotOptions()


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer: each parameter that is a group becomes one option for each of its fields.

    The default of the parameter, an instance of the group, holds the defaults of the options.
    """
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups[parameter.name] = kind
            annotations = get_type_hints(kind, include_extras=True)
            defaults = {field.name: getattr(parameter.default, field.name) for field in fields(kind)}
        else:
            annotations, defaults = {parameter.name: kind}, {parameter.name: parameter.default}
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotations[name])
            for name, default in defaults.items()
        ]

    @functools.wraps(function)
    def command(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        function(**given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
