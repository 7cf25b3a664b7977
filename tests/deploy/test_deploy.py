"""The scripts of deploy/, run with fakes of the launchers and container engines.

A fake is a shell script on PATH that writes its arguments and its environment to a file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
JOBS = ["slurm/nvidia.sh", "slurm/frontier.sh", "pbs/nvidia.sh", "pbs/aurora.sh", "lsf/summit-like.sh"]
SCRIPTS = sorted(DEPLOY.rglob("*.sh"))
#: Real tools that the scripts call; fakes replace everything else.
TOOLS = "bash dirname id sort uniq wc head tail sed stat cat env"
SPECIAL_CHARACTERS = ["python", "a file.py", "--name", 'it\'s "so"', "$HOME", "*"]


class FakePath:
    """A folder of fake commands that is the whole PATH of a script, and the file to which they write.

    The fixtures `commands` and `cluster` make it.
    """

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder, self.written = folder / "bin", folder, folder / "written"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def fake(self, name: str, version: str = "", status: int = 0) -> None:
        """Add a command that records its arguments and exits with `status`; with --version it prints `version`."""
        script = self.bin / name
        script.write_text(
            f'#!{self.bin}/bash\nif [ "$*" = --version ]; then echo "{version}"; exit; fi\n'
            f'{{ printf "%s\\0" "{name}" "$@"; printf "\\1"; env -0; printf "\\2"; }} >>"{self.written}"\n'
            f"exit {status}\n"
        )
        script.chmod(0o755)

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script of deploy/ with only the fakes on PATH."""
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), **variables}
        return subprocess.run(
            [str(self.bin / "bash"), str(DEPLOY / script), *arguments],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=20,
        )

    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        """Return (arguments, environment) of every call of a fake."""
        out = []
        for call in self.written.read_text().split("\2")[:-1]:
            arguments, _, variables = call.partition("\1")
            out.append((arguments.split("\0")[:-1], dict(one.split("=", 1) for one in variables.split("\0")[:-1])))
        return out

    def job(self, script: str, *arguments: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        """Run a job script; return the arguments and the environment of the launcher."""
        done = self.run(script, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return self.calls()[-1]


@pytest.fixture
def commands(tmp_path: Path) -> FakePath:
    """Return a PATH without fakes; a test adds them."""
    return FakePath(tmp_path)


@pytest.fixture
def cluster(commands: FakePath) -> FakePath:
    """Add every launcher, a node file of two nodes for PBS, and one of a launch node and two nodes for LSF."""
    for name in ("srun", "mpiexec", "jsrun", "module"):
        commands.fake(name)
    (commands.folder / "nodes").write_text("x1.mgmt.site\nx1.mgmt.site\nx2.mgmt.site\n")
    (commands.folder / "hosts").write_text("batch1\n" + "a1\n" * 3 + "a2\n" * 3)
    return commands


def scheduler(commands: FakePath) -> dict[str, str]:
    """Return the variables with which PBS and LSF name their node files."""
    return {"PBS_NODEFILE": str(commands.folder / "nodes"), "LSB_DJOB_HOSTFILE": str(commands.folder / "hosts")}


# all scripts


def test_deploy_has_no_unlisted_script() -> None:
    names = {str(path.relative_to(DEPLOY)) for path in SCRIPTS}
    assert names == {*JOBS, "build.sh", "common.sh", "install.sh", "run.sh", "train.sh"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_has_valid_bash_syntax(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], timeout=10).returncode == 0


def test_shellcheck_reports_no_problem() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck")
    done = subprocess.run([shellcheck, "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [*JOBS, "build.sh", "run.sh", "install.sh", "train.sh"])
def test_script_is_executable_and_stops_at_an_error(script: str) -> None:
    text = (DEPLOY / script).read_text()
    assert os.access(DEPLOY / script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("script", JOBS)
def test_job_script_header_names_the_lines_to_edit(script: str) -> None:
    header = (DEPLOY / script).read_text().split("set -euo pipefail")[0]
    assert "Edit" in header
    assert re.search(r"^##(SBATCH --account=|PBS -A |BSUB -P )YOUR_", header, re.MULTILINE)
    # A scheduler reads directives up to the first line that is not a comment.
    assert all(line.startswith("#") or not line for line in header.splitlines())


def test_readme_names_every_job_script_and_no_missing_file() -> None:
    text = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"deploy/([\w/.-]+\.(?:sh|py|def)|Dockerfile)", text))
    assert named >= {*JOBS, "build.sh", "run.sh", "modal_app.py", "Dockerfile", "meshflash.def"}
    assert all((DEPLOY / name).exists() for name in named)


# job scripts


@pytest.mark.parametrize("script", JOBS)
def test_job_runs_the_checksum_by_default(cluster: FakePath, script: str) -> None:
    arguments, _ = cluster.job(script, **scheduler(cluster))
    assert arguments[-2:] == ["meshflash", "checksum"]


@pytest.mark.parametrize("script", JOBS)
def test_job_passes_the_command_on_unchanged(cluster: FakePath, script: str) -> None:
    arguments, _ = cluster.job(script, *SPECIAL_CHARACTERS, **scheduler(cluster))
    assert arguments[-len(SPECIAL_CHARACTERS) :] == SPECIAL_CHARACTERS
    arguments, _ = cluster.job(script, MESHFLASH_COMMAND=shlex.join(SPECIAL_CHARACTERS), **scheduler(cluster))
    assert arguments[-len(SPECIAL_CHARACTERS) :] == SPECIAL_CHARACTERS


@pytest.mark.parametrize("script", JOBS)
def test_job_exits_with_the_status_of_its_command(cluster: FakePath, script: str) -> None:
    for name in ("srun", "mpiexec", "jsrun"):
        cluster.fake(name, status=3)
    assert cluster.run(script, **scheduler(cluster)).returncode == 3


@pytest.mark.parametrize("script", JOBS)
def test_job_loads_modules_and_the_virtual_environment_first(cluster: FakePath, script: str) -> None:
    (cluster.folder / "venv" / "bin").mkdir(parents=True)
    (cluster.folder / "venv" / "bin" / "activate").write_text('export ACTIVE="yes$NOT_SET"\n')
    _, seen = cluster.job(
        script, MESHFLASH_MODULES="one two/2", MESHFLASH_VENV=str(cluster.folder / "venv"), **scheduler(cluster)
    )
    assert cluster.calls()[0][0] == ["module", "load", "one", "two/2"]
    assert seen["ACTIVE"] == "yes"


@pytest.mark.parametrize("script", [name for name in JOBS if not name.startswith("slurm")])
def test_job_script_refuses_to_run_outside_of_a_job(cluster: FakePath, script: str) -> None:
    done = cluster.run(script)
    assert done.returncode != 0
    assert "run this in a" in done.stderr


@pytest.mark.parametrize("script", JOBS)
def test_job_on_a_single_node_sets_no_master_address(cluster: FakePath, script: str) -> None:
    (cluster.folder / "nodes").write_text("x1\nx1\n")
    (cluster.folder / "hosts").write_text("batch1\na1\na1\n")
    _, seen = cluster.job(script, **scheduler(cluster))
    assert not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} & set(seen)


def test_nvidia_job_under_slurm_runs_srun_with_all_gpus(cluster: FakePath) -> None:
    arguments, _ = cluster.job("slurm/nvidia.sh", "hostname", SLURM_CPUS_PER_TASK="8", SLURM_GPUS_ON_NODE="4")
    assert arguments == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=8", "--gpu-bind=none", "hostname"]
    arguments, _ = cluster.job("slurm/nvidia.sh", "hostname")
    assert arguments == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=1", "hostname"]


def test_frontier_job_binds_the_closest_gpu_and_sets_rccl_variables(cluster: FakePath) -> None:
    arguments, seen = cluster.job(
        *("slurm/frontier.sh", "hostname"),
        SLURM_CPUS_PER_TASK="7",
        MESHFLASH_OFI_RCCL="/plugin/lib",
        LD_LIBRARY_PATH="/rocm/lib",
        FI_CXI_DEFAULT_TX_SIZE="512",
    )
    assert arguments == [
        *("srun", "--kill-on-bad-exit=1", "--cpus-per-task=7"),
        *("--gpus-per-task=1", "--gpu-bind=closest", "hostname"),
    ]
    assert seen["LD_LIBRARY_PATH"] == "/plugin/lib:/rocm/lib"
    assert seen["NCCL_SOCKET_IFNAME"] == "hsn0"
    assert seen["NCCL_NET_GDR_LEVEL"] == "PHB"
    assert seen["FI_CXI_DEFAULT_CQ_SIZE"] == "131072"
    assert seen["FI_CXI_DEFAULT_TX_SIZE"] == "512"  # a variable of the user wins
    assert cluster.calls()[0][0] == ["module", "load", "PrgEnv-gnu", "rocm", "craype-accel-amd-gfx90a"]


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({"SLURM_NNODES": "2"}, True),
        ({"SLURM_NNODES": "1"}, False),
        ({"SLURM_NNODES": "2", "LD_LIBRARY_PATH": "/opt/aws-ofi-rccl/lib"}, False),
    ],
)
def test_frontier_job_warns_if_rccl_would_use_tcp(cluster: FakePath, variables: dict[str, str], warns: bool) -> None:
    assert ("goes over TCP" in cluster.run("slurm/frontier.sh", **variables).stderr) == warns


def test_aurora_job_binds_cores_and_sets_ccl_variables(cluster: FakePath) -> None:
    arguments, seen = cluster.job("pbs/aurora.sh", "hostname", CCL_ATL_TRANSPORT="mpi", **scheduler(cluster))
    assert arguments[:6] == ["mpiexec", "-n", "24", "-ppn", "12", "--cpu-bind"]
    assert arguments[7:] == ["hostname"]
    kind, *cores = arguments[6].split(":")
    ranges = [range(int(low), int(high) + 1) for low, high in (part.split("-") for part in cores)]
    assert (kind, len(cores)) == ("list", 12)
    assert (
        len({core for one in ranges for core in one} - {0, 52}) == 12 * 8
    )  # eight cores for each rank, none shared, none of the system
    expected = {
        "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
        "CCL_BACKEND": "native",
        "CCL_ATL_TRANSPORT": "mpi",  # a variable of the user wins
        "CCL_PROCESS_LAUNCHER": "pmix",
        "CCL_ZE_ENABLE": "1",
        "CCL_ZE_IPC_EXCHANGE": "drmfd",
        "FI_PROVIDER": "cxi",
        "MASTER_ADDR": "x1.hsn.cm.aurora.alcf.anl.gov",
    }
    assert {name: seen[name] for name in expected} == expected
    assert cluster.calls()[0][0] == ["module", "load", "frameworks"]


def test_master_address_of_the_user_is_kept(cluster: FakePath) -> None:
    for script in ("pbs/aurora.sh", "lsf/summit-like.sh"):
        assert cluster.job(script, MASTER_ADDR="me", **scheduler(cluster))[1]["MASTER_ADDR"] == "me"


@pytest.mark.parametrize("version", ["mpiexec (OpenRTE) 4.1.4", "mpiexec (Open MPI) 5.0.7"])
def test_nvidia_job_under_pbs_uses_the_options_of_open_mpi(cluster: FakePath, version: str) -> None:
    cluster.fake("mpiexec", version)
    arguments, _ = cluster.job("pbs/nvidia.sh", "hostname", MASTER_ADDR="x1", **scheduler(cluster))
    assert arguments == [
        *("mpiexec", "-n", "8", "--map-by", "ppr:4:node", "--bind-to", "none"),
        *("-x", "PATH", "-x", "MASTER_ADDR", "hostname"),
    ]


def test_nvidia_job_under_pbs_uses_ppn_with_another_mpi(cluster: FakePath) -> None:
    cluster.fake("mpiexec", "HYDRA build details")
    arguments, _ = cluster.job("pbs/nvidia.sh", "hostname", MESHFLASH_PER_NODE="2", **scheduler(cluster))
    assert arguments == ["mpiexec", "-n", "4", "-ppn", "2", "hostname"]


def test_pbs_jobs_run_in_the_folder_of_their_submission(cluster: FakePath) -> None:
    elsewhere = cluster.folder / "elsewhere"
    elsewhere.mkdir()
    for script in ("pbs/nvidia.sh", "pbs/aurora.sh"):
        _, seen = cluster.job(script, PBS_O_WORKDIR=str(elsewhere), **scheduler(cluster))
        assert seen["PWD"] == str(elsewhere)


def test_lsf_job_runs_jsrun_with_one_resource_set_per_node(cluster: FakePath) -> None:
    arguments, seen = cluster.job("lsf/summit-like.sh", "hostname", **scheduler(cluster))
    assert arguments == [
        *("jsrun", "--nrs", "2", "--rs_per_host", "1", "--tasks_per_rs", "6", "--gpu_per_rs", "6"),
        *("--cpu_per_rs", "42", "--launch_distribution", "packed", "--bind", "proportional-packed:7", "hostname"),
    ]
    assert seen["MASTER_ADDR"] == "a1"


# containers


def dry_run(commands: FakePath, script: str, *arguments: str, **variables: str) -> list[str]:
    """Return the arguments of the command that --dry-run prints; no fake is called."""
    done = commands.run(script, "--dry-run", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    assert not commands.written.exists()
    return shlex.split(done.stdout)


def has(arguments: list[str], *part: str) -> bool:
    """Is `part` a contiguous part of the arguments?"""
    return any(tuple(arguments[n : n + len(part)]) == part for n in range(len(arguments)))


@pytest.mark.parametrize(
    ("installed", "engine"),
    [
        (("docker", "podman", "apptainer"), "docker"),
        (("podman", "apptainer"), "podman"),
        (("apptainer", "singularity"), "apptainer"),
        (("singularity",), "singularity"),
    ],
)
def test_first_installed_engine_is_used(commands: FakePath, installed: tuple[str, ...], engine: str) -> None:
    for name in installed:
        commands.fake(name)
    assert dry_run(commands, "run.sh", "--gpu", "none")[:2] == [engine, "run"]
    assert dry_run(commands, "build.sh", "cpu")[:2] == [engine, "build"]


@pytest.mark.parametrize("script", ["run.sh", "build.sh"])
def test_missing_engine_error_lists_the_supported_engines(commands: FakePath, script: str) -> None:
    done = commands.run(script, "--dry-run")
    assert done.returncode == 2
    assert done.stderr == f"{script}: found none of docker, podman, apptainer, singularity\n"


@pytest.mark.parametrize(
    ("engine", "gpu", "flags"),
    [
        ("docker", "nvidia", "--gpus all"),
        ("podman", "nvidia", "--device nvidia.com/gpu=all"),
        ("docker", "amd", "--device /dev/kfd --device /dev/dri"),
        ("podman", "amd", "--device /dev/kfd --device /dev/dri"),
        ("docker", "intel", "--device /dev/dri"),
        ("apptainer", "nvidia", "--nv"),
        ("apptainer", "amd", "--rocm"),
        ("apptainer", "intel", "--bind /dev/dri"),
    ],
)
def test_gpu_option_becomes_flags_of_the_engine(commands: FakePath, engine: str, gpu: str, flags: str) -> None:
    arguments = dry_run(commands, "run.sh", "--engine", engine, "--gpu", gpu, "--image", "mine", "meshflash", "doctor")
    assert has(arguments, *flags.split())
    assert arguments[-3:] == ["mine", "meshflash", "doctor"]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_containers_use_the_host_network_and_shared_memory(commands: FakePath, engine: str) -> None:
    arguments = dry_run(commands, "run.sh", "--engine", engine, "--gpu", "none")
    assert has(arguments, "--network", "host")
    assert has(arguments, "--ipc", "host")
    assert has(arguments, "--ulimit", "memlock=-1")
    assert has(arguments, "--volume", f"{commands.folder}:/work", "--workdir", "/work")
    assert not {"--gpus", "--device"} & set(arguments) or Path("/dev/infiniband").exists()
    assert arguments[-1] == "meshflash:cpu"  # no command follows, so the image runs its own


def test_apptainer_gets_no_gpu_flag_without_a_gpu(commands: FakePath) -> None:
    assert dry_run(commands, "run.sh", "--engine", "apptainer", "--gpu", "none") == [
        "apptainer",
        "run",
        "meshflash-cpu.sif",
    ]


@pytest.mark.parametrize("engine", ["docker", "podman", "apptainer"])
def test_container_gets_the_command_unchanged(commands: FakePath, engine: str) -> None:
    arguments = dry_run(commands, "run.sh", "--engine", engine, "--gpu", "nvidia", "--", *SPECIAL_CHARACTERS)
    assert arguments[-len(SPECIAL_CHARACTERS) :] == SPECIAL_CHARACTERS
    commands.fake(engine, status=4)
    assert commands.run("run.sh", "--gpu", "nvidia", *SPECIAL_CHARACTERS).returncode == 4
    [(called, _)] = commands.calls()
    assert called == arguments


def test_container_gets_the_variables_of_the_launcher(commands: FakePath) -> None:
    variables = {
        "SLURM_PROCID": "1",
        "MASTER_ADDR": "n1",
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0",
        "SECRET": "s",
    }
    arguments = dry_run(commands, "run.sh", "--engine", "docker", "--gpu", "nvidia", **variables)
    passed = {arguments[n + 1] for n, argument in enumerate(arguments) if argument == "--env"}
    assert passed - {"HOME=/tmp", "USER=meshflash"} == set(variables) - {"SECRET"}


def test_installed_gpus_are_detected(commands: FakePath) -> None:
    commands.fake("docker")
    commands.fake("nvidia-smi")
    assert has(dry_run(commands, "run.sh"), "--gpus", "all")
    assert has(dry_run(commands, "build.sh"), "--target", "cuda")


@pytest.mark.parametrize("arguments", [["--gpu", "intel"], ["--gpu", "other"], ["--engine", "none"], ["--else"]])
def test_run_refuses_unknown_options(commands: FakePath, arguments: list[str]) -> None:
    done = commands.run("run.sh", "--dry-run", "--engine", "docker", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("run.sh: ")


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_build_passes_target_tag_and_repository_root(commands: FakePath, target: str) -> None:
    assert dry_run(commands, "build.sh", "--engine", "docker", target, "--", "--no-cache") == [
        *("docker", "build", "--file", str(DEPLOY / "Dockerfile"), "--target", target),
        *("--tag", f"meshflash:{target}", "--no-cache", str(ROOT)),
    ]
    arguments = dry_run(commands, "build.sh", "--engine", "apptainer", target)
    assert has(arguments, "--build-arg", f"KIND={target}", "--build-arg", f"IMAGE={base_images()[target]}")
    assert arguments[-2:] == [str(commands.folder / f"meshflash-{target}.sif"), "deploy/meshflash.def"]


def test_build_refuses_an_unknown_target(commands: FakePath) -> None:
    assert commands.run("build.sh", "--dry-run", "--engine", "docker", "xpu").returncode == 2


def base_images() -> dict[str, str]:
    """Return the base image of every target of the Dockerfile."""
    found = re.findall(r"^ARG (\w+)_IMAGE=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return {name.lower(): image for name, image in found}


def test_targets_differ_only_in_their_base_image() -> None:
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    bodies = {}
    for stage in stages:
        first, body = stage.split("\n", 1)
        name = first.split(" AS ")[1]
        bodies[name] = body.strip().replace(f"system {name}", "system X").replace(f"project {name}", "project X")
    assert list(bodies) == ["wheel", *base_images()]
    assert bodies["cpu"] == bodies["cuda"] == bodies["rocm"]
    assert bodies["cpu"].endswith('USER meshflash\nWORKDIR /home/meshflash\nCMD ["meshflash", "doctor"]')


def test_images_copy_only_files_that_exist() -> None:
    definition = (DEPLOY / "meshflash.def").read_text()
    listed = definition.split("%files\n")[1].split("\n\n")[0].split("\n")
    files = [line.split()[0] for line in listed]
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        files += copied.split()
    assert all((ROOT / name).exists() for name in files)
    assert f"IMAGE={base_images()['cpu']}\n" in definition


@pytest.mark.parametrize("arguments", [["system", "xpu"], ["other", "cpu"], ["system"], []])
def test_install_refuses_unknown_arguments(commands: FakePath, arguments: list[str]) -> None:
    assert commands.run("install.sh", *arguments).returncode != 0
