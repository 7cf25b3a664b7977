"""The configuration of a training run: nested frozen dataclasses, and presets as functions that return a whole one.

TOML or the command line can change any field by its path: `mesh.cp=4`, `model.layers=2`. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from meshflash.models import gpt_config as gpt
from meshflash.models import vit_config as vit
from meshflash.models.gpt_config import GPTConfig
from meshflash.models.vit_config import ViTConfig

#: The dtypes of compute; master weights are float32.
DTYPES = ("float32", "bfloat16", "float16")
#: The value None, which TOML lacks.
NONE = "none"


@dataclass(frozen=True)
class Mesh:
    """The mesh and attention over it; see `meshflash.parallel.init_mesh` and `parallelize`.

    Attributes:
        dp: The data-parallel size; -1 takes all remaining ranks.
        fsdp: The sharded data-parallel size.
        cp: The context-parallel size.
        tp: The tensor-parallel size.
        order: The order of the axes, fastest first.
        mode: How weights are sharded: "full", "grad_op", "hybrid", or None for the default of the mesh.
        schedule: The schedule of attention over cp.
        layout: Which tokens each rank of cp holds.
    """

    dp: int = -1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    order: str = "cp-tp-dp"
    mode: str | None = None
    schedule: str = "auto"
    layout: str = "zigzag"


@dataclass(frozen=True)
class Data:
    """The training data and the batch size.

    Attributes:
        source: A synthetic task ("copy", "needle" or "images"), or a path, as `meshflash data` wrote it.
        tokens: The tokens of a sample.
        batch: The samples of a step over all ranks.
        micro: The samples of a micro-batch on each rank.
        samples: The number of samples of a synthetic task.
        seed: The seed of the data and of their order.
        valid: The validation data. By default other samples of a synthetic task, and nothing for a path.
        valid_samples: The number of validation samples of a synthetic task.
        height: The height of images in pixels.
        width: The width of images in pixels.
    """

    source: str = "copy"
    tokens: int = 256
    batch: int = 8
    micro: int = 8
    samples: int = 100_000
    seed: int = 0
    valid: str | None = None
    valid_samples: int = 64
    height: int = 64
    width: int = 64


@dataclass(frozen=True)
class Optimizer:
    """AdamW with a linear warmup and a cosine decay; only matrices have weight decay.

    Attributes:
        lr: The peak learning rate.
        final: The final learning rate as a share of the peak.
        warmup: The steps of the warmup.
        weight_decay: The weight decay of matrices.
        beta1: The decay of the first moment.
        beta2: The decay of the second moment.
        eps: The epsilon of AdamW.
        clip: The largest norm of the gradients.
        sharded: Whether the optimizer state of replicated weights is sharded (ZeRO-1).
    """

    lr: float = 3e-4
    final: float = 0.1
    warmup: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    clip: float = 1.0
    sharded: bool = False


@dataclass(frozen=True)
class Memory:
    """Options that save memory without changing results; see `meshflash.parallel.parallelize`.

    Attributes:
        activation_checkpointing: "full", "selective" or None.
        offload_activations: Whether checkpointed activations move to the host.
        offload_weights: Whether weight shards and optimizer state stay on the host.
        tiles: The number of slices of tokens in which MLPs are computed.
    """

    activation_checkpointing: str | None = None
    offload_activations: bool = False
    offload_weights: bool = False
    tiles: int = 1


@dataclass(frozen=True)
class Run:
    """The length and precision of a run, and the intervals of its outputs; an interval of 0 is never.

    Attributes:
        steps: The last step.
        dtype: The dtype of compute.
        seed: The seed of the initial weights.
        log: The steps between metrics.
        evaluate: The steps between evaluations.
        save: The steps between checkpoints.
        save_minutes: The minutes between checkpoints.
        keep: The number of newest checkpoints that stay.
        compare: The steps between comparisons of replicated weights across ranks.
        deterministic: Whether GPU kernels are deterministic; slower, but a resumed run is then bitwise equal.
    """

    steps: int = 1000
    dtype: str = "float32"
    seed: int = 0
    log: int = 10
    evaluate: int = 0
    save: int = 0
    save_minutes: float = 0.0
    keep: int = 3
    compare: int = 100
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"run.dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}")
        for name in ("steps", "log", "evaluate", "save", "save_minutes", "compare"):
            if getattr(self, name) < 0:
                raise ValueError(f"run.{name}={getattr(self, name)}: expected 0, which is never, or more")


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run; presets and `change` make it.

    Args:
        model: The model, a GPT or a ViT.
        mesh: The sizes of the mesh axes, and how attention and weights use them.
        data: The data set and the batches.
        optimizer: The optimizer and its schedule.
        memory: The options that trade time for memory.
        run: The steps, evaluations and checkpoints.
    """

    model: GPTConfig | ViTConfig
    mesh: Mesh = field(default_factory=Mesh)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    memory: Memory = field(default_factory=Memory)
    run: Run = field(default_factory=Run)

    @property
    def kind(self) -> str:
        """Return the kind of model: gpt or vit."""
        return "gpt" if isinstance(self.model, GPTConfig) else "vit"


def gpt_tiny() -> Config:
    """Return the copy task on a tiny GPT: learned in seconds on a CPU, and only if attention crosses ranks."""
    return Config(
        gpt.tiny(vocabulary=32, dim=64, layers=2, heads=4, kv_heads=2, hidden=128, theta=1000.0),
        data=Data("copy", tokens=64, batch=32, micro=32),
        optimizer=Optimizer(lr=5e-3, warmup=30, weight_decay=0.01, beta2=0.98),
        run=Run(steps=150, evaluate=50),
    )


def gpt_125m() -> Config:
    """Return 125 million parameters at 2,048 tokens."""
    return Config(
        gpt.gpt_125m(),
        data=Data("data", tokens=2048, batch=256, micro=8),
        run=Run(dtype="bfloat16", save=1000, save_minutes=20.0),
    )


def llama3_2_1b() -> Config:
    """Return Llama 3.2 1B at 131,072 tokens: weights sharded over all ranks, sequences over 8."""
    return Config(
        gpt.llama3_2_1b(),
        Mesh(cp=8, mode="full", schedule="zigzag"),
        Data("data", tokens=131_072, batch=16, micro=1),
        memory=Memory(activation_checkpointing="selective"),
        run=Run(dtype="bfloat16", save=500, save_minutes=20.0),
    )


def llama3_8b() -> Config:
    """Return Llama 3 8B at 8,192 tokens: weights sharded over all ranks."""
    return Config(
        gpt.llama3_8b(),
        Mesh(mode="full"),
        Data("data", tokens=8192, batch=256, micro=1),
        memory=Memory(activation_checkpointing="selective"),
        run=Run(dtype="bfloat16", save=500, save_minutes=20.0),
    )


def llama3_8b_1m() -> Config:
    """Return Llama 3 8B at a million tokens: sequences sharded over 64 ranks, activations on the host."""
    return Config(
        gpt.llama3_8b_1m(),
        Mesh(cp=64, mode="full", schedule="zigzag"),
        Data("data", tokens=1_048_576, batch=4, micro=1),
        memory=Memory(activation_checkpointing="selective", offload_activations=True, tiles=16),
        run=Run(dtype="bfloat16", save=100, save_minutes=20.0),
    )


def vit_tiny() -> Config:
    """Return synthetic images on a tiny ViT: the class depends on two patches far apart."""
    return Config(
        vit.tiny(),
        Mesh(layout="contiguous"),
        Data("images", batch=32, micro=32, height=24, width=40),
        Optimizer(lr=2e-3, warmup=20),
        run=Run(steps=300, evaluate=100),
    )


def vit_base() -> Config:
    """Return ViT-B/16: 86 million parameters at 224 x 224 pixels."""
    return Config(
        vit.vit_base(),
        Mesh(layout="contiguous"),
        Data("data", batch=256, micro=32, height=224, width=224),
        run=Run(dtype="bfloat16", save=1000, save_minutes=20.0),
    )


def vit_2_6b() -> Config:
    """Return 2.6 billion parameters at 262,144 patches: images of 2,048 x 2,048 sharded over 8 ranks."""
    return Config(
        vit.vit_2_6b(),
        Mesh(cp=8, mode="full", schedule="ring", layout="contiguous"),
        Data("data", batch=8, micro=1, height=2048, width=2048),
        memory=Memory(activation_checkpointing="selective"),
        run=Run(dtype="bfloat16", save=200, save_minutes=20.0),
    )


PRESETS: dict[str, dict[str, Callable[[], Config]]] = {
    "gpt": {
        "tiny": gpt_tiny,
        "125m": gpt_125m,
        "llama3.2-1b": llama3_2_1b,
        "llama3-8b": llama3_8b,
        "llama3-8b-1m": llama3_8b_1m,
    },
    "vit": {"tiny": vit_tiny, "base": vit_base, "2.6b": vit_2_6b},
}


def preset(kind: str, name: str) -> Config:
    """Return the configuration of a preset.

    Args:
        kind: The kind of model: gpt or vit.
        name: The name of the preset.

    >>> preset("gpt", "tiny").data.source
    'copy'
    """
    if kind not in PRESETS:
        raise ValueError(f"{kind!r}: expected one of {', '.join(PRESETS)}")
    if name not in PRESETS[kind]:
        raise ValueError(f"preset={name!r}: expected one of {', '.join(PRESETS[kind])}")
    return PRESETS[kind][name]()


def assignments(texts: list[str]) -> dict[str, Any]:
    """Return the changes of `path=value` texts, as `--set` takes them.

    Args:
        texts: The texts, as `mesh.cp=4`; values are TOML, or plain text.

    >>> assignments(["mesh.cp=4", "data.source=copy", "memory.activation_checkpointing=none"])
    {'mesh': {'cp': 4}, 'data': {'source': 'copy'}, 'memory': {'activation_checkpointing': None}}
    """
    found: dict[str, Any] = {}
    for text in texts:
        path, sign, value = text.partition("=")
        if not sign or not path:
            raise ValueError(f"{text!r}: expected path=value, as in mesh.cp=4")
        table = found
        *tables, name = path.split(".")
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = _value(value)
    return found


def change(config: Any, changes: Mapping[str, Any], path: str = "") -> Any:
    """Return a configuration with other values of some fields.

    Raises ValueError with the path of a field that does not exist or has another type.

    Args:
        config: The configuration, or a table of it.
        changes: New values by field, nested by table.
        path: The path of the table, for errors.

    >>> change(preset("gpt", "tiny"), {"mesh": {"cp": 2}}).mesh.cp
    2
    """
    types = get_type_hints(type(config))
    names = [f.name for f in dataclasses.fields(config)]
    new: dict[str, Any] = {}
    for name, value in changes.items():
        where = f"{path}{name}"
        if name not in names:
            raise ValueError(f"{where}: there is no such field; expected one of {', '.join(path + n for n in names)}")
        old = getattr(config, name)
        if isinstance(value, Mapping):
            if not dataclasses.is_dataclass(old):
                old = _made(types[name], where)
            new[name] = change(old, value, f"{where}.")
        else:
            new[name] = _fit(value, types[name], where)
    if "head_dim" in names and new.keys() & {"dim", "heads"}:
        new.setdefault("head_dim", None)  # derived from the new sizes
    return replace(config, **new)


def as_dict(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON takes it, with its kind."""
    return {"kind": config.kind, **asdict(config)}


def from_dict(given: Mapping[str, Any]) -> Config:
    """Return the configuration of a dict that `as_dict` made; field names of earlier versions are accepted.

    >>> from_dict(as_dict(preset("vit", "tiny"))) == preset("vit", "tiny")
    True
    """
    parts = dict(given)
    base = preset(parts.pop("kind"), "tiny")
    return change(base, parts)


def to_toml(config: Config) -> str:
    """Return a configuration as TOML with all its fields and its kind, as `--config` takes it.

    >>> to_toml(preset("gpt", "tiny")).splitlines()[:4]
    ['kind = "gpt"', '', '[model]', 'vocabulary = 32']
    """
    return "\n".join(_toml_lines(as_dict(config), "")) + "\n"


def _toml_lines(table: Mapping[str, Any], path: str) -> list[str]:
    """Return the lines of a table: its values first, since TOML gives all lines behind a header to that header."""
    lines = [f"{name} = {_toml_value(value)}" for name, value in table.items() if not isinstance(value, Mapping)]
    for name, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{name}]", *_toml_lines(value, f"{path}{name}.")]
    return lines


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    # a JSON string is a TOML string, but for the one control character that JSON leaves as it is
    return json.dumps(NONE if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _made(kind: Any, where: str) -> Any:
    """Return a new table for a field that is None."""
    for option in get_args(kind):
        if dataclasses.is_dataclass(option):
            return option()  # type: ignore[operator]
    raise ValueError(f"{where}: it is a value, not a table")


def _fit(value: Any, kind: Any, where: str) -> Any:
    """Return a value converted to the type of its field, or raise ValueError."""
    options = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    for option in sorted(options, key=lambda option: option is not NoneType):  # "none" is None before it is a text
        plain = get_origin(option) or option
        if option is NoneType and value in (None, NONE):
            return None
        if plain is tuple and isinstance(value, list | tuple):
            return tuple(value)
        if plain is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(plain, type) and isinstance(value, plain) and (plain is bool) == isinstance(value, bool):
            return value
    names = " or ".join(getattr(option, "__name__", str(option)) for option in options)
    raise ValueError(f"{where}={value!r}: expected {names}")


def _value(text: str) -> Any:
    """Return a value as TOML reads it, else the text itself; "none" is None."""
    if text in (NONE, "None", ""):
        return None
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text
