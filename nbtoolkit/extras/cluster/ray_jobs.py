"""Train a run on a Ray cluster, whose Ray Train starts the ranks; a search's trials are tasks.

A detached actor, the driver, outlives the kernel. It and all ranks read the run's folder, which
must be on storage that the machines share.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtoolkit.environment.installed import install_line
from nbtoolkit.errors import LaunchError, MissingExtra
from nbtoolkit.extras.cluster.recipes import devices_per_node
from nbtoolkit.launcher.remote import load_call
from nbtoolkit.run.attempts import readable_last_event, run_config
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.run.remote_job import JobState
from nbtoolkit.worker.main import write_output_to

if TYPE_CHECKING:
    from nbtoolkit.config.schema import Config

_NAMESPACE = "nbtoolkit"
_ANSWER_SECONDS = 30.0
_CONNECT_SECONDS = 10.0
_RETURN_SECONDS = 0.2


class Ray:
    """The Ray cluster that this machine belongs to or reaches; see ``run.remote_job.JobQueue``."""

    def check(self, config: Config, *, search: bool) -> int | None:
        """Check the package, the cluster, and the shape of the job."""
        if not search:
            devices_per_node(config)
        _connect(config.cluster.address)
        return None

    def submit(self, paths: RunPaths, config: Config, *, search: bool) -> Mapping[str, object]:
        """Start the driver."""
        ray = _connect(config.cluster.address)
        # The driver of an attempt that has just ended keeps its name for some seconds.
        name = f"{paths.run_id}-{secrets.token_hex(3)}"
        driver = ray.remote(RunDriver).options(
            name=name,
            namespace=_NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=config.cluster.restarts,
            # Ray counts its attempts to reach an actor on a lost node, until it knows of the loss,
            # as retries; max_restarts bounds how often a driver that dies starts again.
            max_task_retries=-1,
            # Trials report while the search runs.
            max_concurrency=1000,
        )
        driver.remote().run.remote(str(paths.folder), search)
        return {"name": name, "address": config.cluster.address}

    def state(self, job: Mapping[str, object]) -> JobState:
        """Ask the driver; an actor that is gone has ended."""
        address = job.get("address")
        name = str(job["name"])
        ray = _connect(address if isinstance(address, str) else None)
        try:
            driver = ray.get_actor(name, namespace=_NAMESPACE)
            text = ray.get(driver.text.remote(), timeout=_ANSWER_SECONDS)
        except (ValueError, ray.exceptions.RayActorError):
            return JobState(phase="ended", text="Ray's job has ended")
        except ray.exceptions.RayError as error:
            return JobState(phase="waiting", text=f"Ray does not answer: {type(error).__name__}")
        return JobState(phase="running", text=f"Ray's job: {text}")

    def cancel(self, job: Mapping[str, object]) -> None:
        """Kill the driver; what it has started ends with it."""
        address = job.get("address")
        ray = _connect(address if isinstance(address, str) else None)
        try:
            ray.kill(ray.get_actor(str(job["name"]), namespace=_NAMESPACE))
        except ValueError:  # it has ended
            return


RAY = Ray()


def _connect(address: str | None) -> Any:
    """Import Ray, and connect this process to the cluster."""
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(f'where="ray" needs Ray: {error}', do=install_line("ray")) from error
    if ray.is_initialized():
        return ray
    address = address or os.environ.get("RAY_ADDRESS", "auto")
    try:
        _check_reachable(address)
        ray.init(address=address, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        place = "this machine" if address == "auto" else address
        raise LaunchError(
            f"there is no Ray cluster at {place}: {error}",
            allowed="a machine of a running cluster (ray start), or cluster.address",
            do="start one with `ray start --head`, or set cluster.address",
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Try the port of the cluster: Ray itself tries for ten minutes.

    Raises:
        OSError: nothing answers there.
    """
    if where := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address):
        socket.create_connection((where[1], int(where[2])), _CONNECT_SECONDS).close()


class RunDriver:
    """Runs one launch or search, in an actor of its own."""

    def __init__(self) -> None:
        self._text = "starting"
        self._search: Any = None

    def text(self) -> str:
        """Say what it does."""
        return self._text if self._search is None else self._search.text()

    def run(self, folder: str, search: bool) -> None:
        """Run to the end, and end this actor."""
        import ray

        paths = RunPaths(Path(folder))
        write_output_to(paths.remote.with_name("log.txt"))
        try:
            if search:
                self._run_search(paths)
            else:
                self._run_ranks(paths)
        finally:
            # In a call of its own: Ray reports the call that calls exit_actor as one that failed.
            me = ray.get_runtime_context().current_actor
            me.end.options(max_task_retries=0).remote()

    def end(self) -> None:
        """End this actor, once :meth:`run` has returned."""
        import ray

        time.sleep(_RETURN_SECONDS)
        ray.actor.exit_actor()

    def report(self, key: str, values: Mapping[str, float], step: int | None) -> str | None:
        """Judge the report of a trial."""
        verdict: str | None = self._search.report(key, values, step)
        return verdict

    def announce(self, key: str, message: Any) -> None:
        """Receive the names of the metrics that a trial will report."""
        self._search.announce(key, message)

    def _run_search(self, paths: RunPaths) -> None:
        import ray

        from nbtoolkit.extras.cluster.ray_search import RaySearch
        from nbtoolkit.search.submit import schedule_here

        self._search = RaySearch(ray.get_runtime_context().current_actor)
        schedule_here.set(self._search.run)
        load_call(paths)()

    def _run_ranks(self, paths: RunPaths) -> None:
        from ray.train import RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer

        config = run_config(paths)
        cluster = config.cluster
        ranks = config.cluster.nodes * devices_per_node(config)
        each = {"CPU": cluster.cpus_per_device or 1, **({"GPU": 1} if cluster.gpu else {})}
        self._text = f"{ranks} ranks"
        for turn in range(cluster.restarts + 1):
            trainer = TorchTrainer(
                train_rank,
                train_loop_config={"folder": str(paths.folder)},
                scaling_config=ScalingConfig(
                    num_workers=ranks, use_gpu=cluster.gpu, resources_per_worker=each
                ),
                run_config=RunConfig(
                    name=f"{paths.run_id}-{turn}", storage_path=str(paths.remote.with_name("ray"))
                ),
            )
            try:
                trainer.fit()
                return
            except TrainingFailedError as error:
                print(f"start {turn + 1} has failed: {error}", flush=True)
                if not _lost_rank(paths):
                    return


def _lost_rank(paths: RunPaths) -> bool:
    """Whether a rank was lost, and the function has not failed by itself.

    A lost rank leaves no error, or breaks the connections of the others.
    """
    ended = readable_last_event(paths)
    if ended is None or ended.error is None:
        return True
    lost = re.search(r"(?i)gloo|nccl|connection|peer|torch\.distributed", ended.error)
    return lost is not None


def train_rank(settings: Mapping[str, str]) -> None:
    """Make the call of the run in a worker of Ray Train, as one of its ranks."""
    paths = RunPaths(Path(settings["folder"]))
    write_output_to(paths.log(int(os.environ["RANK"])))
    load_call(paths)()
