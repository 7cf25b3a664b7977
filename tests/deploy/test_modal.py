"""The Modal app: its steps, output and parameters, with a fake of Modal, and with Modal itself if it is installed."""

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


class Chain:
    """A fake of `modal.Image` that records each call; the fixture `modal_app` makes it."""

    def __init__(self, calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] | None = None) -> None:
        self.calls = calls or []

    def __getattr__(self, name: str) -> Callable[..., Chain]:
        return lambda *arguments, **options: Chain([*self.calls, (name, arguments, options)])


class App:
    """A fake of `modal.App` that records the options of its functions and returns them unchanged; `load` makes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.declared: dict[str, dict[str, Any]] = {}

    def function(self, **options: Any) -> Callable[[Any], Any]:
        def declare(function: Any) -> Any:
            self.declared[function.__name__] = options
            return function

        return declare


def load() -> Any:
    """Import deploy/modal_app.py anew."""
    spec = importlib.util.spec_from_file_location("modal_app", DEPLOY / "modal_app.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["modal_app"] = module  # dataclasses look their module up here
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["modal_app"]
    return module


@pytest.fixture
def modal_app(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the app, imported with a fake of Modal as it was before version 1.6."""
    sizes: dict[str, Any] = {}

    def clustered(**options: Any) -> Callable[[Any], Any]:
        sizes.update(options)
        return lambda function: function

    experimental = ModuleType("modal.experimental")
    cluster_info = SimpleNamespace(rank=1, container_ips=["fd00::1", "fd00::2"])
    vars(experimental).update(clustered=clustered, get_cluster_info=lambda: cluster_info, sizes=sizes)
    modal = ModuleType("modal")
    vars(modal).update(App=App, Image=Chain(), experimental=experimental)
    monkeypatch.setitem(sys.modules, "modal", modal)
    monkeypatch.setitem(sys.modules, "modal.experimental", experimental)
    return load()


class Runner:
    """A fake of `execute` that records commands; the command `fails_at` exits with `status`. Tests make it."""

    def __init__(self, fails_at: int = -1, status: int = 7) -> None:
        self.commands: list[list[str]] = []
        self.fails_at, self.status = fails_at, status

    def __call__(self, command: Sequence[str]) -> int:
        self.commands.append(list(command))
        return self.status if len(self.commands) - 1 == self.fails_at else 0


def test_modal_run_prints_its_progress_and_runs_each_step(
    modal_app: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("src", "README.md"):
        (tmp_path / name).touch()
    runner = Runner()
    project = str(tmp_path)
    modal_app.run_steps(modal_app.opening_lines(project), modal_app.job_steps(4, project), runner)
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


def test_modal_job_uses_the_requested_number_of_ranks(modal_app: Any) -> None:
    assert [step.command[2:4] for step in modal_app.job_steps(2)[1:]] == [("2", "--allow-run-as-root"), ("-n", "2")]
    with pytest.raises(ValueError, match="nproc=0"):
        modal_app.job_steps(0)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_modal_run_stops_at_the_first_failing_step(modal_app: Any, fails_at: int) -> None:
    runner = Runner(fails_at)
    with pytest.raises(RuntimeError, match="ended with exit status 7"):
        modal_app.run_steps([], modal_app.job_steps(4), runner)
    assert len(runner.commands) == fails_at + 1


def test_modal_execute_returns_the_exit_status(modal_app: Any) -> None:
    assert modal_app.execute([sys.executable, "-c", "raise SystemExit(5)"]) == 5


def test_modal_cluster_runs_one_torchrun_per_container(modal_app: Any) -> None:
    _, step = modal_app.cluster_steps(1, ["fd00::1", "fd00::2"])
    assert list(step.command) == [
        *("torchrun", "--nnodes=2", "--nproc-per-node=gpu", "--node-rank=1", "--master-addr=fd00::1"),
        *("--master-port=29500", "--no-python", "meshflash", "checksum"),
    ]


def test_modal_functions_declare_their_gpus_and_run_their_steps(
    modal_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = modal_app.app.declared
    assert modal_app.app.name == "meshflash"
    assert {name: options["gpu"] for name, options in declared.items()} == {"run": "H100", "cluster": "H100:8"}
    assert all(options["image"] is modal_app.image for options in declared.values())
    assert modal_app.modal.experimental.sizes == {"size": 2, "rdma": True}

    runs: list[Any] = []
    monkeypatch.setattr(modal_app, "opening_lines", lambda: ["here"])
    monkeypatch.setattr(modal_app, "run_steps", lambda lines, steps: runs.append((lines, steps)))
    modal_app.run()
    modal_app.run(nproc=2)
    modal_app.cluster()
    steps = [modal_app.job_steps(4), modal_app.job_steps(2), modal_app.cluster_steps(1, ["fd00::1", "fd00::2"])]
    assert runs == [(["here"], one) for one in steps]


def test_modal_image_installs_mpi_and_the_dependencies(modal_app: Any) -> None:
    calls = {name: (arguments, options) for name, arguments, options in modal_app.image.calls}
    assert list(calls) == [
        *("debian_slim", "apt_install", "add_local_file", "pip_install_from_pyproject", "env", "add_local_dir"),
    ]
    assert calls["debian_slim"] == ((), {"python_version": "3.12"})
    assert {"openmpi-bin", "libopenmpi-dev"} <= set(calls["apt_install"][0])
    assert calls["add_local_file"][1] == {"copy": True}  # a later build step reads it
    arguments, options = calls["pip_install_from_pyproject"]
    assert arguments == (str(ROOT / "pyproject.toml"),)
    assert options == {"optional_dependencies": ["mpi"], "extra_options": "-c /root/constraints.txt"}
    arguments, options = calls["add_local_dir"]
    assert arguments == (ROOT, "/root/project")
    assert {".*", "**/__pycache__"} <= set(options["ignore"])


def test_modal_gpu_and_number_of_nodes_come_from_environment_variables(
    modal_app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHFLASH_MODAL_GPU", "A100-80GB")
    monkeypatch.setenv("MESHFLASH_MODAL_NODES", "4")
    again = load()
    assert again.app.declared["cluster"]["gpu"] == "A100-80GB:8"
    assert again.modal.experimental.sizes["size"] == 4


def test_installed_modal_accepts_the_app() -> None:
    modal = pytest.importorskip("modal")
    module = load()
    assert isinstance(module.app, modal.App)
    assert isinstance(module.image, modal.Image)
    assert isinstance(module.run, modal.Function)
    assert isinstance(module.cluster, modal.Function)


def test_installed_modal_exposes_the_parameters_as_options() -> None:
    pytest.importorskip("modal")
    arguments = [sys.executable, "-m", "modal", "run", f"{DEPLOY}/modal_app.py::run", "--help"]
    environment = {**os.environ, "MODAL_CONFIG_PATH": os.devnull, "COLUMNS": "100"}
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert "--nproc" in done.stdout


def test_modal_uploads_only_files_that_the_installation_needs() -> None:
    modal = pytest.importorskip("modal")
    ignored = modal.FilePatternMatcher(*load().IGNORED)
    for name in (".git/config", ".venv/bin/python", "src/meshflash/__pycache__/api.pyc", "meshflash-cpu.sif"):
        assert ignored(Path(name)), name
    for name in ("pyproject.toml", "README.md", "LICENSE", "src/meshflash/api.py", "src/meshflash/py.typed"):
        assert not ignored(Path(name)), name
