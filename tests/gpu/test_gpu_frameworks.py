"""Scripts of the frameworks' documentation on one NVIDIA GPU: killed, and resumed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from gpu_scripts import told

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("script", "kill_at"),
    [
        ("lightning_in_15_minutes", 11),
        ("transformers_fine_tuning", 9),
        ("keras_simple_mnist_convnet", 10),
    ],
)
def test_a_killed_script_ends_as_the_whole_one_does(
    script: str, kill_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(script.partition("_")[0]) is None:
        pytest.skip(f"NOT TESTED: {script}'s package is not installed")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    code = f"""
    import framework_scripts
    from nbtoolkit.errors import WorkerDied

    more = {{"train.epochs": 2, "train.batch_size": 8, "optim.lr": 0.01, "train.precision": "fp32"}}

    def run(kill_at):
        given = {{**more, "data": {{"seconds": 0.0, "kill_at": kill_at}}}}
        return launch(framework_scripts.{script}, config=given)

    whole = run(0)
    try:
        run({kill_at})
        died = False
    except WorkerDied:
        died = True
    resumed = run({kill_at})
    tell(died=died, kind=resumed.plan.device_type, resumed=resumed.value["weights"],
         whole=whole.value["weights"], touched=torch.cuda.is_initialized())
    """
    answers = told(code, tmp_path)
    assert answers["died"]
    assert answers["kind"] == "cuda"
    assert answers["resumed"] == pytest.approx(answers["whole"], rel=1e-3)
    assert answers["touched"] is False
