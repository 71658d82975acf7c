"""Every setting of the section ``cluster`` has an effect on the job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from every_field import PROVEN, leaves, proves
from login_node import login_node  # noqa: F401

from nbtoolkit.config.schema import Config, load_config
from nbtoolkit.errors import LaunchError, PlanError
from nbtoolkit.extras.cluster.ray_jobs import RAY
from nbtoolkit.extras.cluster.recipes import recipe
from nbtoolkit.extras.cluster.slurm import SLURM
from nbtoolkit.run.identity import Identity
from nbtoolkit.run.paths import RunPaths
from nbtoolkit.tasks.digits import train as digits


def test_every_field_of_the_section_is_proven_once() -> None:
    proven = sorted(name for name in PROVEN if name.startswith("cluster."))
    assert proven == sorted(name for name in leaves(Config) if name.startswith("cluster."))


def script_of(**values: Any) -> str:
    overrides = {f"cluster.{name}": value for name, value in values.items()}
    return recipe("slurm", load_config(overrides=overrides))


@proves(
    *("cluster.account", "cluster.cpus_per_device", "cluster.devices", "cluster.gpu"),
    *("cluster.memory", "cluster.modules", "cluster.nodes", "cluster.options"),
    *("cluster.partition", "cluster.restarts", "cluster.setup", "cluster.signal_seconds"),
    *("cluster.time_limit",),
)
@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("nodes", 3, "#SBATCH --nodes=3"),
        ("devices", 4, "#SBATCH --gpus-per-node=4"),
        ("gpu", False, "#SBATCH --cpus-per-task=1"),
        ("cpus_per_device", 6, "#SBATCH --cpus-per-task=6"),
        ("memory", "64G", "#SBATCH --mem=64G"),
        ("time_limit", "90m", "#SBATCH --time=90"),
        ("signal_seconds", 300, "#SBATCH --signal=USR1@300"),
        ("restarts", 4, 'if [ "$status" -eq 3 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 4 ]; then'),
        ("partition", "gpu", "#SBATCH --partition=gpu"),
        ("account", "lab", "#SBATCH --account=lab"),
        ("options", {"qos": "high", "exclusive": True}, "#SBATCH --qos=high"),
        ("modules", ["cuda/12.4"], "module load cuda/12.4"),
        ("setup", ["source .venv/bin/activate"], "source .venv/bin/activate"),
    ],
)
def test_a_setting_is_in_the_script(name: str, value: object, line: str) -> None:
    assert line in script_of(**{"devices": 2, name: value}).splitlines()


@proves("cluster.container", "cluster.python")
@pytest.mark.usefixtures("login_node")
def test_a_container_and_a_python_of_the_machines(tmp_path: Path) -> None:
    def job(**values: Any) -> str:
        more = {f"cluster.{name}": value for name, value in values.items()}
        config = load_config(overrides={"cluster.devices": 1, **more})
        paths = RunPaths.create(tmp_path, "train")
        SLURM.submit(paths, config, search=False)
        return paths.remote.with_name("job.sh").read_text()

    assert "--container-image=image.sqsh python3 -m nbtoolkit.extras.cluster.job" in job(
        container="image.sqsh"
    )
    assert " apptainer exec --nv i.sif python -m nbtoolkit.extras.cluster.job" in job(
        python="apptainer exec --nv i.sif python"
    )


def test_a_value_that_would_become_another_line_of_the_script_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cluster: qos: .* is not an option of sbatch"):
        script_of(devices=1, options={"qos": "a\nreboot"})


def test_the_section_does_not_change_what_a_run_is() -> None:
    one, other = Config(), load_config(env=None, overrides={"cluster.nodes": 4})
    assert Identity.of(one.to_dict(), digits) == Identity.of(other.to_dict(), digits)


@proves("cluster.address")
@pytest.mark.cluster
def test_ray_is_looked_for_at_the_address() -> None:
    pytest.importorskip("ray", reason="NOT TESTED: Ray is not installed (make test-cluster)")
    config = load_config(overrides={"cluster.address": "127.0.0.1:1", "cluster.devices": 1})
    with pytest.raises(LaunchError, match=r"there is no Ray cluster at 127\.0\.0\.1:1"):
        RAY.check(config, search=False)
