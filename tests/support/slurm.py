"""A Slurm of two nodes on this machine: Debian's slurm-wlm and munge, as root, until closed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from reaper import reaped

from nbtoolkit.run.paths import RunPaths

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def missing() -> str:
    """What this machine lacks for it; empty: nothing."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"{', '.join(lacking)} not installed (make test-cluster)" if lacking else ""


class Slurm:
    """The commands of a running Slurm."""

    def __init__(self, folder: Path) -> None:
        self.variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str, cwd: Path | None = None) -> str:
        """What a command prints."""
        done = subprocess.run(
            words, cwd=cwd, env=self.variables, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def job_of(self, paths: RunPaths) -> str:
        """The number of a run's job."""
        number: str = json.loads(paths.remote.read_text())["job"]["number"]
        return number

    def end_all_jobs(self) -> None:
        """Cancel all jobs, and wait until their processes have ended."""
        self.run("scancel", "--full", "--user=root")
        deadline = time.monotonic() + 60
        while jobs := self.run("squeue", "--noheader"):
            assert time.monotonic() < deadline, jobs
            time.sleep(0.2)

    def wait_for_job(self, job: str, state: str, seconds: float) -> None:
        """Wait until a job has this state."""
        deadline = time.monotonic() + seconds
        while f"JobState={state}" not in (shown := self.run("scontrol", "show", "job", job)):
            assert time.monotonic() < deadline, shown
            time.sleep(0.5)


@contextmanager
def running() -> Iterator[Slurm]:
    """Start it, wait until both nodes are idle, and end it with all that its jobs have started.

    Jobs outlive their daemons: the daemons are ended after the jobs, and what is left then, or when
    the tests are interrupted or killed, is killed.

    The nodes are called n1 and n2. Their tasks find these names in a hosts file of their own, which
    ``unshare`` mounts for the two daemons alone.
    """
    # Not pytest's folder: the path of a socket has 107 characters at most.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    host = socket.gethostname()
    ports = _three_ports()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, ports=ports))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host} n1 n2\n")
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    folder.chmod(0o755)
    slurm = Slurm(folder)
    own_hosts = f'mount --bind {folder}/hosts /etc/hosts && exec "$@"'
    node = ["unshare", "--mount", "sh", "-c", own_hosts, "sh", "slurmd", "-D", "-N"]
    munge = [f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "log-file")]
    munge += [f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/munge.seed"]
    try:
        with ExitStack() as stack:
            stack.enter_context(reaped(f"SLURM_CONF={slurm.variables['SLURM_CONF']}"))
            for words in (
                ["munged", "--foreground", "--force", f"--key-file={folder}/key", *munge],
                ["slurmctld", "-D"],
                [*node, "n1"],
                [*node, "n2"],
            ):
                stack.enter_context(_daemon(words, slurm.variables))
            _wait_until_idle(slurm)
            stack.callback(slurm.end_all_jobs)
            yield slurm
    finally:
        shutil.rmtree(folder)


@contextmanager
def _daemon(words: list[str], variables: dict[str, str]) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, env=variables, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_idle(slurm: Slurm) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            states = slurm.run("sinfo", "--noheader", "--format=%T %D")
        except subprocess.CalledProcessError as error:
            states = str(error.stderr)  # the controller does not answer yet
        if states == "idle 2":
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.5)


def _three_ports() -> list[int]:
    """A free port, and two free ones in a row (Slurm writes the nodes' ports as a range)."""
    while True:
        with socket.socket() as one, socket.socket() as two, socket.socket() as three:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            port: int = two.getsockname()[1]
            try:
                three.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return [one.getsockname()[1], port, port + 1]
