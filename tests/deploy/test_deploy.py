"""Scripts that start meshflash elsewhere, run here with stand-ins for the launchers, the engines and Modal.

A stand-in is a shell script on PATH that writes its arguments, and what it was told to look at of its environment.
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
#: What scripts call and stand-ins do not stand for.
TOOLS = "bash dirname id sort uniq wc head tail sed stat cat env"
ODD = ["python", "a file.py", "--name", 'it\'s "so"', "$HOME", "*"]


class Desk:
    """A folder of stand-ins that is all of PATH, and where they write."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.folder, self.written = folder / "bin", folder, folder / "written"
        self.bin.mkdir()
        for tool in TOOLS.split():
            (self.bin / tool).symlink_to(str(shutil.which(tool)))

    def fake(self, name: str, says: str = "", status: int = 0) -> None:
        """A command that writes what it was called with; with --version it says who it is."""
        script = self.bin / name
        script.write_text(
            f'#!{self.bin}/bash\nif [ "$*" = --version ]; then echo "{says}"; exit; fi\n'
            f'{{ printf "%s\\0" "{name}" "$@"; printf "\\1"; env -0; printf "\\2"; }} >>"{self.written}"\n'
            f"exit {status}\n"
        )
        script.chmod(0o755)

    def run(self, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A script of deploy/, with nothing but the stand-ins around it."""
        environment = {"PATH": str(self.bin), "HOME": str(self.folder), **variables}
        return subprocess.run(
            [str(self.bin / "bash"), str(DEPLOY / script), *words],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=20,
        )

    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        """What the stand-ins were called with, and the environment that they saw."""
        out = []
        for call in self.written.read_text().split("\2")[:-1]:
            words, _, variables = call.partition("\1")
            out.append((words.split("\0")[:-1], dict(one.split("=", 1) for one in variables.split("\0")[:-1])))
        return out

    def job(self, script: str, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        """The launcher's arguments, and its environment, after a job script has run."""
        done = self.run(script, *words, **variables)
        assert done.returncode == 0, done.stderr
        return self.calls()[-1]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def cluster(desk: Desk) -> Desk:
    """Every launcher, two nodes for PBS, a launch node and two more for LSF."""
    for name in ("srun", "mpiexec", "jsrun", "module"):
        desk.fake(name)
    (desk.folder / "nodes").write_text("x1.mgmt.site\nx1.mgmt.site\nx2.mgmt.site\n")
    (desk.folder / "hosts").write_text("batch1\n" + "a1\n" * 3 + "a2\n" * 3)
    return desk


def scheduler(desk: Desk) -> dict[str, str]:
    return {"PBS_NODEFILE": str(desk.folder / "nodes"), "LSB_DJOB_HOSTFILE": str(desk.folder / "hosts")}


# scripts as such


def test_every_script_is_known() -> None:
    names = {str(path.relative_to(DEPLOY)) for path in SCRIPTS}
    assert names == {*JOBS, "build.sh", "common.sh", "install.sh", "run.sh", "train.sh"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_it(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], timeout=10).returncode == 0


def test_shellcheck_finds_nothing() -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck")
    done = subprocess.run([shellcheck, "-x", *SCRIPTS], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", [*JOBS, "build.sh", "run.sh", "install.sh", "train.sh"])
def test_it_runs_by_its_name_and_stops_at_an_error(script: str) -> None:
    text = (DEPLOY / script).read_text()
    assert os.access(DEPLOY / script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n# ")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("script", JOBS)
def test_a_job_script_says_what_to_edit(script: str) -> None:
    header = (DEPLOY / script).read_text().split("set -euo pipefail")[0]
    assert "Edit" in header
    assert re.search(r"^##(SBATCH --account=|PBS -A |BSUB -P )YOUR_", header, re.MULTILINE)
    # a scheduler stops reading at the first line that is no comment
    assert all(line.startswith("#") or not line for line in header.splitlines())


def test_the_readme_names_every_job_script_and_no_other() -> None:
    text = (DEPLOY / "README.md").read_text()
    named = set(re.findall(r"deploy/([\w/.-]+\.(?:sh|py|def)|Dockerfile)", text))
    assert named >= {*JOBS, "build.sh", "run.sh", "modal_app.py", "Dockerfile", "meshflash.def"}
    assert all((DEPLOY / name).exists() for name in named)


# job scripts


@pytest.mark.parametrize("script", JOBS)
def test_a_job_runs_the_checksum_unless_told_otherwise(cluster: Desk, script: str) -> None:
    words, _ = cluster.job(script, **scheduler(cluster))
    assert words[-2:] == ["meshflash", "checksum"]


@pytest.mark.parametrize("script", JOBS)
def test_a_command_arrives_as_it_was_given(cluster: Desk, script: str) -> None:
    words, _ = cluster.job(script, *ODD, **scheduler(cluster))
    assert words[-len(ODD) :] == ODD
    words, _ = cluster.job(script, MESHFLASH_COMMAND=shlex.join(ODD), **scheduler(cluster))
    assert words[-len(ODD) :] == ODD


@pytest.mark.parametrize("script", JOBS)
def test_a_job_fails_when_its_command_does(cluster: Desk, script: str) -> None:
    for name in ("srun", "mpiexec", "jsrun"):
        cluster.fake(name, status=3)
    assert cluster.run(script, **scheduler(cluster)).returncode == 3


@pytest.mark.parametrize("script", JOBS)
def test_modules_and_an_environment_come_first(cluster: Desk, script: str) -> None:
    (cluster.folder / "venv" / "bin").mkdir(parents=True)
    (cluster.folder / "venv" / "bin" / "activate").write_text('export ACTIVE="yes$NOT_SET"\n')
    _, seen = cluster.job(
        script, MESHFLASH_MODULES="one two/2", MESHFLASH_VENV=str(cluster.folder / "venv"), **scheduler(cluster)
    )
    assert cluster.calls()[0][0] == ["module", "load", "one", "two/2"]
    assert seen["ACTIVE"] == "yes"


@pytest.mark.parametrize("script", [name for name in JOBS if not name.startswith("slurm")])
def test_outside_of_a_job_it_says_so(cluster: Desk, script: str) -> None:
    done = cluster.run(script)
    assert done.returncode != 0
    assert "run this in a" in done.stderr


@pytest.mark.parametrize("script", JOBS)
def test_on_one_node_it_names_no_master(cluster: Desk, script: str) -> None:
    (cluster.folder / "nodes").write_text("x1\nx1\n")
    (cluster.folder / "hosts").write_text("batch1\na1\na1\n")
    _, seen = cluster.job(script, **scheduler(cluster))
    assert not {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} & set(seen)


def test_nvidia_under_slurm(cluster: Desk) -> None:
    words, _ = cluster.job("slurm/nvidia.sh", "hostname", SLURM_CPUS_PER_TASK="8", SLURM_GPUS_ON_NODE="4")
    assert words == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=8", "--gpu-bind=none", "hostname"]
    words, _ = cluster.job("slurm/nvidia.sh", "hostname")
    assert words == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=1", "hostname"]


def test_frontier(cluster: Desk) -> None:
    words, seen = cluster.job(
        *("slurm/frontier.sh", "hostname"),
        SLURM_CPUS_PER_TASK="7",
        MESHFLASH_OFI_RCCL="/plugin/lib",
        LD_LIBRARY_PATH="/rocm/lib",
        FI_CXI_DEFAULT_TX_SIZE="512",
    )
    assert words == [
        *("srun", "--kill-on-bad-exit=1", "--cpus-per-task=7"),
        *("--gpus-per-task=1", "--gpu-bind=closest", "hostname"),
    ]
    assert seen["LD_LIBRARY_PATH"] == "/plugin/lib:/rocm/lib"
    assert seen["NCCL_SOCKET_IFNAME"] == "hsn0"
    assert seen["NCCL_NET_GDR_LEVEL"] == "PHB"
    assert seen["FI_CXI_DEFAULT_CQ_SIZE"] == "131072"
    assert seen["FI_CXI_DEFAULT_TX_SIZE"] == "512"  # ours gives way
    assert cluster.calls()[0][0] == ["module", "load", "PrgEnv-gnu", "rocm", "craype-accel-amd-gfx90a"]


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({"SLURM_NNODES": "2"}, True),
        ({"SLURM_NNODES": "1"}, False),
        ({"SLURM_NNODES": "2", "LD_LIBRARY_PATH": "/opt/aws-ofi-rccl/lib"}, False),
    ],
)
def test_frontier_warns_where_rccl_would_go_over_tcp(cluster: Desk, variables: dict[str, str], warns: bool) -> None:
    assert ("goes over TCP" in cluster.run("slurm/frontier.sh", **variables).stderr) == warns


def test_aurora(cluster: Desk) -> None:
    words, seen = cluster.job("pbs/aurora.sh", "hostname", CCL_ATL_TRANSPORT="mpi", **scheduler(cluster))
    assert words[:6] == ["mpiexec", "-n", "24", "-ppn", "12", "--cpu-bind"]
    assert words[7:] == ["hostname"]
    kind, *cores = words[6].split(":")
    ranges = [range(int(low), int(high) + 1) for low, high in (part.split("-") for part in cores)]
    assert (kind, len(cores)) == ("list", 12)
    assert len({core for one in ranges for core in one} - {0, 52}) == 12 * 8  # of each rank its own, none the system's
    expected = {
        "ZE_FLAT_DEVICE_HIERARCHY": "FLAT",
        "CCL_BACKEND": "native",
        "CCL_ATL_TRANSPORT": "mpi",  # ours gives way
        "CCL_PROCESS_LAUNCHER": "pmix",
        "CCL_ZE_ENABLE": "1",
        "CCL_ZE_IPC_EXCHANGE": "drmfd",
        "FI_PROVIDER": "cxi",
        "MASTER_ADDR": "x1.hsn.cm.aurora.alcf.anl.gov",
    }
    assert {name: seen[name] for name in expected} == expected
    assert cluster.calls()[0][0] == ["module", "load", "frameworks"]


def test_a_master_that_was_named_stays(cluster: Desk) -> None:
    for script in ("pbs/aurora.sh", "lsf/summit-like.sh"):
        assert cluster.job(script, MASTER_ADDR="me", **scheduler(cluster))[1]["MASTER_ADDR"] == "me"


@pytest.mark.parametrize("says", ["mpiexec (OpenRTE) 4.1.4", "mpiexec (Open MPI) 5.0.7"])
def test_nvidia_under_pbs_with_open_mpi(cluster: Desk, says: str) -> None:
    cluster.fake("mpiexec", says)
    words, _ = cluster.job("pbs/nvidia.sh", "hostname", MASTER_ADDR="x1", **scheduler(cluster))
    assert words == [
        *("mpiexec", "-n", "8", "--map-by", "ppr:4:node", "--bind-to", "none"),
        *("-x", "PATH", "-x", "MASTER_ADDR", "hostname"),
    ]


def test_nvidia_under_pbs_with_another_mpi(cluster: Desk) -> None:
    cluster.fake("mpiexec", "HYDRA build details")
    words, _ = cluster.job("pbs/nvidia.sh", "hostname", MESHFLASH_PER_NODE="2", **scheduler(cluster))
    assert words == ["mpiexec", "-n", "4", "-ppn", "2", "hostname"]


def test_pbs_jobs_run_where_they_were_submitted(cluster: Desk) -> None:
    elsewhere = cluster.folder / "elsewhere"
    elsewhere.mkdir()
    for script in ("pbs/nvidia.sh", "pbs/aurora.sh"):
        _, seen = cluster.job(script, PBS_O_WORKDIR=str(elsewhere), **scheduler(cluster))
        assert seen["PWD"] == str(elsewhere)


def test_jsrun(cluster: Desk) -> None:
    words, seen = cluster.job("lsf/summit-like.sh", "hostname", **scheduler(cluster))
    assert words == [
        *("jsrun", "--nrs", "2", "--rs_per_host", "1", "--tasks_per_rs", "6", "--gpu_per_rs", "6"),
        *("--cpu_per_rs", "42", "--launch_distribution", "packed", "--bind", "proportional-packed:7", "hostname"),
    ]
    assert seen["MASTER_ADDR"] == "a1"


# containers


def printed(desk: Desk, script: str, *words: str, **variables: str) -> list[str]:
    """The command that --dry-run prints, as a shell reads it."""
    done = desk.run(script, "--dry-run", *words, **variables)
    assert done.returncode == 0, done.stderr
    assert not desk.written.exists()
    return shlex.split(done.stdout)


def has(words: list[str], *part: str) -> bool:
    return any(tuple(words[n : n + len(part)]) == part for n in range(len(words)))


@pytest.mark.parametrize(
    ("installed", "taken"),
    [
        (("docker", "podman", "apptainer"), "docker"),
        (("podman", "apptainer"), "podman"),
        (("apptainer", "singularity"), "apptainer"),
        (("singularity",), "singularity"),
    ],
)
def test_the_engine_that_is_found_is_taken(desk: Desk, installed: tuple[str, ...], taken: str) -> None:
    for name in installed:
        desk.fake(name)
    assert printed(desk, "run.sh", "--gpu", "none")[:2] == [taken, "run"]
    assert printed(desk, "build.sh", "cpu")[:2] == [taken, "build"]


@pytest.mark.parametrize("script", ["run.sh", "build.sh"])
def test_without_an_engine_it_says_what_it_looked_for(desk: Desk, script: str) -> None:
    done = desk.run(script, "--dry-run")
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
def test_gpus_are_passed_on(desk: Desk, engine: str, gpu: str, flags: str) -> None:
    words = printed(desk, "run.sh", "--engine", engine, "--gpu", gpu, "--image", "mine", "meshflash", "doctor")
    assert has(words, *flags.split())
    assert words[-3:] == ["mine", "meshflash", "doctor"]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_ranks_get_the_host_network_and_its_memory(desk: Desk, engine: str) -> None:
    words = printed(desk, "run.sh", "--engine", engine, "--gpu", "none")
    assert has(words, "--network", "host")
    assert has(words, "--ipc", "host")
    assert has(words, "--ulimit", "memlock=-1")
    assert has(words, "--volume", f"{desk.folder}:/work", "--workdir", "/work")
    assert not {"--gpus", "--device"} & set(words) or Path("/dev/infiniband").exists()
    assert words[-1] == "meshflash:cpu"  # its own command


def test_no_gpu_is_no_flag_of_apptainer(desk: Desk) -> None:
    assert printed(desk, "run.sh", "--engine", "apptainer", "--gpu", "none") == [
        "apptainer",
        "run",
        "meshflash-cpu.sif",
    ]


@pytest.mark.parametrize("engine", ["docker", "podman", "apptainer"])
def test_a_command_enters_the_container_as_it_was_given(desk: Desk, engine: str) -> None:
    words = printed(desk, "run.sh", "--engine", engine, "--gpu", "nvidia", "--", *ODD)
    assert words[-len(ODD) :] == ODD
    desk.fake(engine, status=4)
    assert desk.run("run.sh", "--gpu", "nvidia", *ODD).returncode == 4
    [(called, _)] = desk.calls()
    assert called == words


def test_what_a_launcher_says_enters_the_container(desk: Desk) -> None:
    told = {"SLURM_PROCID": "1", "MASTER_ADDR": "n1", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "0", "SECRET": "s"}
    words = printed(desk, "run.sh", "--engine", "docker", "--gpu", "nvidia", **told)
    passed = {words[n + 1] for n, word in enumerate(words) if word == "--env"}
    assert passed - {"HOME=/tmp", "USER=meshflash"} == set(told) - {"SECRET"}


def test_gpus_are_found(desk: Desk) -> None:
    desk.fake("docker")
    desk.fake("nvidia-smi")
    assert has(printed(desk, "run.sh"), "--gpus", "all")
    assert has(printed(desk, "build.sh"), "--target", "cuda")


@pytest.mark.parametrize("words", [["--gpu", "intel"], ["--gpu", "other"], ["--engine", "none"], ["--else"]])
def test_run_refuses_what_it_does_not_know(desk: Desk, words: list[str]) -> None:
    done = desk.run("run.sh", "--dry-run", "--engine", "docker", *words)
    assert done.returncode == 2
    assert done.stderr.startswith("run.sh: ")


@pytest.mark.parametrize("target", ["cpu", "cuda", "rocm"])
def test_build_names_target_tag_and_root(desk: Desk, target: str) -> None:
    assert printed(desk, "build.sh", "--engine", "docker", target, "--", "--no-cache") == [
        *("docker", "build", "--file", str(DEPLOY / "Dockerfile"), "--target", target),
        *("--tag", f"meshflash:{target}", "--no-cache", str(ROOT)),
    ]
    words = printed(desk, "build.sh", "--engine", "apptainer", target)
    assert has(words, "--build-arg", f"KIND={target}", "--build-arg", f"IMAGE={base_images()[target]}")
    assert words[-2:] == [str(desk.folder / f"meshflash-{target}.sif"), "deploy/meshflash.def"]


def test_build_refuses_another_target(desk: Desk) -> None:
    assert desk.run("build.sh", "--dry-run", "--engine", "docker", "xpu").returncode == 2


def base_images() -> dict[str, str]:
    found = re.findall(r"^ARG (\w+)_IMAGE=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return {name.lower(): image for name, image in found}


def test_every_target_is_the_same_but_for_its_base() -> None:
    stages = re.split(r"^FROM ", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
    bodies = {}
    for stage in stages:
        first, body = stage.split("\n", 1)
        name = first.split(" AS ")[1]
        bodies[name] = body.strip().replace(f"system {name}", "system X").replace(f"project {name}", "project X")
    assert list(bodies) == ["wheel", *base_images()]
    assert bodies["cpu"] == bodies["cuda"] == bodies["rocm"]
    assert bodies["cpu"].endswith('USER meshflash\nWORKDIR /home/meshflash\nCMD ["meshflash", "doctor"]')


def test_images_are_made_of_files_that_exist() -> None:
    definition = (DEPLOY / "meshflash.def").read_text()
    listed = definition.split("%files\n")[1].split("\n\n")[0].split("\n")
    files = [line.split()[0] for line in listed]
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE):
        files += copied.split()
    assert all((ROOT / name).exists() for name in files)
    assert f"IMAGE={base_images()['cpu']}\n" in definition


@pytest.mark.parametrize("words", [["system", "xpu"], ["other", "cpu"], ["system"], []])
def test_install_refuses_what_it_does_not_know(desk: Desk, words: list[str]) -> None:
    assert desk.run("install.sh", *words).returncode != 0
