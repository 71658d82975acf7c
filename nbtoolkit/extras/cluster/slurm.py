"""Submit a run to Slurm with ``sbatch``, as the script of ``nbtoolkit recipe slurm``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from nbtoolkit.environment.variables import without_stale
from nbtoolkit.errors import LaunchError, PlanError
from nbtoolkit.extras.cluster.job import EARLY_FILE
from nbtoolkit.extras.cluster.recipes import devices_per_node, slurm_script
from nbtoolkit.run.paths import write_whole
from nbtoolkit.run.remote_job import JobState, Phase

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config
    from nbtoolkit.run.paths import RunPaths

_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SUSPENDED"}
_RUNNING = {"RUNNING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING", "STOPPED"}
_SECONDS = 60.0  # that a command of Slurm may take


class Slurm:
    """The Slurm of this machine; see :class:`nbtoolkit.run.remote_job.JobQueue`.

    On one node the job calls ``nb.launch`` once, on several nodes in one task per device.
    """

    def check(self, config: Config, *, search: bool) -> int | None:
        """Check the programs and the shape of the job."""
        if (missing := shutil.which("sbatch") is None) or shutil.which("squeue") is None:
            raise LaunchError(
                f"there is no Slurm here: {'sbatch' if missing else 'squeue'} is not on PATH",
                allowed="a login node of a cluster, or another machine with Slurm's commands",
                do='call it there, or leave where="slurm" out',
            )
        config = _for_search(config) if search else config
        # It refuses options that sbatch could not read.
        slurm_script(config, name="", tasks=1, command="", ended_early="")
        if search and config.cluster.nodes > 1:
            raise PlanError(
                f"a search with cluster.nodes: {config.cluster.nodes}: its trials share one node",
                allowed='cluster.nodes: 1; where="ray" spreads trials over machines',
                do="set cluster.nodes: 1, and cluster.devices to the devices of a node",
            )
        return devices_per_node(config) if config.cluster.nodes == 1 else None

    def submit(self, paths: RunPaths, config: Config, *, search: bool) -> Mapping[str, object]:
        """Write the script into the run's folder, and submit it."""
        config = _for_search(config) if search else config
        alone = config.cluster.nodes == 1
        devices = devices_per_node(config)
        # Slurm replaces %t by the task's number.
        folder = str(paths.folder).replace("%", "%%")
        outputs = [f"--output={folder}/{name}" for name in ("remote/log.txt", "ranks/%t/log.txt")]
        for rank in range(0 if alone else devices * config.cluster.nodes):
            paths.log(rank).parent.mkdir(parents=True, exist_ok=True)
        command = ["--kill-on-bad-exit=1", outputs[0 if alone else 1], "--open-mode=append"]
        if config.cluster.container:
            command.append(f"--container-image={config.cluster.container}")
        call = f"-m nbtoolkit.extras.cluster.job {shlex.quote(str(paths.folder))}"
        early = shlex.quote(str(paths.folder / EARLY_FILE))
        script = slurm_script(
            config,
            name=paths.run_id,
            tasks=1 if alone else devices,
            command=f"{shlex.join(command)} {_python(config)} {call}",
            ended_early=f"-e {early}",
            setup=f"rm -f {early}",
        )
        file = paths.remote.with_name("job.sh")
        write_whole(file, script)
        number = _run("sbatch", "--parsable", outputs[0], str(file))
        return {"number": number.partition(";")[0]}

    def state(self, job: Mapping[str, object]) -> JobState:
        """Ask ``squeue``; Slurm forgets an ended job after some minutes (MinJobAge)."""
        number = str(job["number"])
        words = ("--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r")
        try:
            answer = _run("squeue", *words)
        except LaunchError as error:
            if "Invalid job id" in error.what:
                return JobState(phase="ended", text=f"Slurm no longer knows its job {number}")
            return JobState(phase="waiting", text=f"job {number}, unknown: {error.what}")
        word, _, reason = answer.partition("|")
        text = f"Slurm's job {number}: {word or 'ended'}"
        if reason not in ("", "None"):
            text += f" ({reason})"
        if word == "TIMEOUT":
            text += ", at its time limit"
        return JobState(phase=_phase(word), text=text)

    def cancel(self, job: Mapping[str, object]) -> None:
        """Call ``scancel``."""
        _run("scancel", str(job["number"]))


SLURM = Slurm()


def _phase(word: str) -> Phase:
    if word in _WAITING:
        return "waiting"
    return "running" if word in _RUNNING else "ended"


def _for_search(config: Config) -> Config:
    """Return the configuration without the ranks of a trial, which are not those of the job."""
    return config.with_overrides({"distributed.world_size": "auto"})


def _python(config: Config) -> str:
    """Return the words that start Python, for the shell."""
    if config.cluster.python is not None:
        return config.cluster.python
    return "python3" if config.cluster.container else shlex.quote(sys.executable)


def _run(*words: str) -> str:
    """Run a command of Slurm; return what it prints.

    Raises:
        LaunchError: it failed.
    """
    # Of a kernel that itself runs in a job; the variables would become options of the new one.
    environ = without_stale(os.environ)
    if "SLURM_CONF" in os.environ:
        environ["SLURM_CONF"] = os.environ["SLURM_CONF"]
    try:
        done = subprocess.run(
            words, env=environ, capture_output=True, text=True, check=True, timeout=_SECONDS
        )
    except subprocess.CalledProcessError as error:
        text = " ".join((error.stderr or error.stdout).split())
    except (OSError, subprocess.TimeoutExpired) as error:
        text = str(error)
    else:
        return done.stdout.strip()
    raise LaunchError(
        f"{words[0]} failed: {text}",
        allowed="a job that the cluster accepts, and a controller that answers",
        do=f"correct the settings of cluster, or run it by hand: {shlex.join(words)}",
    )
