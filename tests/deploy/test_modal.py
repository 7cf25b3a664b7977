"""The Modal app: its steps, lines and parameters, with a stand-in for Modal, and with Modal where it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


# Modal
class Chain:
    """Stands in for Modal's image: remembers each call."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] | None = None) -> None:
        self.calls = calls or []

    def __getattr__(self, name: str) -> Callable[..., Chain]:
        return lambda *words, **options: Chain([*self.calls, (name, words, options)])


class App:
    """Stands in for Modal's app: remembers what its functions were declared with, and leaves them as they are."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.declared: dict[str, dict[str, Any]] = {}

    def function(self, **options: Any) -> Callable[[Any], Any]:
        def declare(function: Any) -> Any:
            self.declared[function.__name__] = options
            return function

        return declare


def load() -> Any:
    spec = importlib.util.spec_from_file_location("modal_app", DEPLOY / "modal_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["modal_app"] = module  # dataclasses look it up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["modal_app"]
    return module


@pytest.fixture
def modal_app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The app with stand-ins for all of Modal, as it was before 1.6."""
    sizes: dict[str, Any] = {}

    def clustered(**options: Any) -> Callable[[Any], Any]:
        sizes.update(options)
        return lambda function: function

    experimental = ModuleType("modal.experimental")
    here = SimpleNamespace(rank=1, container_ips=["fd00::1", "fd00::2"])
    vars(experimental).update(clustered=clustered, get_cluster_info=lambda: here, sizes=sizes)
    modal = ModuleType("modal")
    vars(modal).update(App=App, Image=Chain(), experimental=experimental)
    monkeypatch.setitem(sys.modules, "modal", modal)
    monkeypatch.setitem(sys.modules, "modal.experimental", experimental)
    return load()


class Runner:
    """Remembers commands; the n-th ends with a status of its own."""

    def __init__(self, fails_at: int = -1, status: int = 7) -> None:
        self.commands: list[list[str]] = []
        self.fails_at, self.status = fails_at, status

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(list(command))
        return self.status if len(self.commands) - 1 == self.fails_at else 0


def test_modal_prints_and_runs(modal_app: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("src", "README.md"):
        (tmp_path / name).touch()
    runner = Runner()
    project = str(tmp_path)
    modal_app.carry_out(modal_app.opening(project), modal_app.job(4, project), runner)
    assert capsys.readouterr().out.splitlines() == [
        f"== base_dir == {project}",
        "== Files in project == ['README.md', 'src']",
        "🔧 Building...",
        "🚀 Running distributed FlashAttention...",
    ]
    build, job, check = runner.commands
    assert build[:4] == [sys.executable, "-m", "pip", "install"]
    assert build[-1] == project
    assert job == ["mpirun", "-np", "4", "--allow-run-as-root", "--oversubscribe", "meshflash", "checksum"]
    assert check == ["meshflash", "check", "-n", "4", "--quick"]


def test_modal_on_other_ranks(modal_app: Any) -> None:
    assert [step.command[2:4] for step in modal_app.job(2)[1:]] == [("2", "--allow-run-as-root"), ("-n", "2")]
    with pytest.raises(ValueError, match="nproc=0"):
        modal_app.job(0)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_modal_stops_at_what_fails(modal_app: Any, fails_at: int) -> None:
    runner = Runner(fails_at)
    with pytest.raises(RuntimeError, match="ended with exit status 7"):
        modal_app.carry_out([], modal_app.job(4), runner)
    assert len(runner.commands) == fails_at + 1


def test_modal_executes(modal_app: Any) -> None:
    assert modal_app.execute([sys.executable, "-c", "raise SystemExit(5)"]) == 5


def test_modal_one_torchrun_for_each_container(modal_app: Any) -> None:
    _, step = modal_app.cluster_job(1, ["fd00::1", "fd00::2"])
    assert list(step.command) == [
        *("torchrun", "--nnodes=2", "--nproc-per-node=gpu", "--node-rank=1", "--master-addr=fd00::1"),
        *("--master-port=29500", "--no-python", "meshflash", "checksum"),
    ]


def test_modal_functions(modal_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = modal_app.app.declared
    assert modal_app.app.name == "meshflash"
    assert {name: options["gpu"] for name, options in declared.items()} == {"run": "H100", "cluster": "H100:8"}
    assert all(options["image"] is modal_app.image for options in declared.values())
    assert modal_app.modal.experimental.sizes == {"size": 2, "rdma": True}

    carried: list[Any] = []
    monkeypatch.setattr(modal_app, "opening", lambda: ["here"])
    monkeypatch.setattr(modal_app, "carry_out", lambda lines, steps: carried.append((lines, steps)))
    modal_app.run()
    modal_app.run(nproc=2)
    modal_app.cluster()
    steps = [modal_app.job(4), modal_app.job(2), modal_app.cluster_job(1, ["fd00::1", "fd00::2"])]
    assert carried == [(["here"], one) for one in steps]


def test_modal_image(modal_app: Any) -> None:
    calls = {name: (words, options) for name, words, options in modal_app.image.calls}
    assert list(calls) == [
        *("debian_slim", "apt_install", "add_local_file", "pip_install_from_pyproject", "env", "add_local_dir"),
    ]
    assert calls["debian_slim"] == ((), {"python_version": "3.12"})
    assert {"openmpi-bin", "libopenmpi-dev"} <= set(calls["apt_install"][0])
    assert calls["add_local_file"][1] == {"copy": True}  # a later step reads it
    words, options = calls["pip_install_from_pyproject"]
    assert words == (str(ROOT / "pyproject.toml"),)
    assert options == {"optional_dependencies": ["mpi"], "extra_options": "-c /root/constraints.txt"}
    words, options = calls["add_local_dir"]
    assert words == (ROOT, "/root/project")
    assert {".*", "**/__pycache__"} <= set(options["ignore"])


def test_modal_gpu_and_nodes_are_chosen_where_it_is_called(modal_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHFLASH_MODAL_GPU", "A100-80GB")
    monkeypatch.setenv("MESHFLASH_MODAL_NODES", "4")
    again = load()
    assert again.app.declared["cluster"]["gpu"] == "A100-80GB:8"
    assert again.modal.experimental.sizes["size"] == 4


def test_modal_itself_takes_the_app() -> None:
    modal = pytest.importorskip("modal")
    module = load()
    assert isinstance(module.app, modal.App)
    assert isinstance(module.image, modal.Image)
    assert isinstance(module.run, modal.Function)
    assert isinstance(module.cluster, modal.Function)


def test_modal_reads_the_command_line() -> None:
    pytest.importorskip("modal")
    words = [sys.executable, "-m", "modal", "run", f"{DEPLOY}/modal_app.py::run", "--help"]
    environment = {**os.environ, "MODAL_CONFIG_PATH": os.devnull, "COLUMNS": "100"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert "--nproc" in done.stdout


def test_modal_uploads_what_is_installed_and_no_more() -> None:
    modal = pytest.importorskip("modal")
    ignored = modal.FilePatternMatcher(*load().IGNORED)
    for name in (".git/config", ".venv/bin/python", "src/meshflash/__pycache__/api.pyc", "meshflash-cpu.sif"):
        assert ignored(Path(name)), name
    for name in ("pyproject.toml", "README.md", "LICENSE", "src/meshflash/api.py", "src/meshflash/py.typed"):
        assert not ignored(Path(name)), name
