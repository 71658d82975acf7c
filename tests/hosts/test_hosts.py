"""Every notebook, unchanged, in environments like Kaggle's and Colab's, without internet.

The environments are like the images in every version that matters; the sessions are fresh, and
the notebook's own first cell installs nbtoolkit from a bundle of wheels alone.
"""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest
from image_venv import image_venv
from names import WORKING
from notebook_sizes import NOTEBOOKS, QUICK
from room import Room

from nbtoolkit.notebooks.document import read_as_saved, with_parameters
from nbtoolkit.sessions.wheels import make_bundle

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(1800)]

NBVAL = Path(__file__).resolve().parents[1] / "nbval.cfg"

# As the host itself does it: nothing of ours is there before the first cell has run.
FIRST = {
    "kaggle": "$PYTHON -m papermill --no-progress-bar notebook.ipynb executed.ipynb",
    "colab": "$PYTHON -m nbconvert --to notebook --execute notebook.ipynb --output executed.ipynb",
}

PASSES = """
$PYTHON -c "import importlib.util as u; assert u.find_spec('nbtoolkit') is None"
mkdir first program plain
{bring}
cp $NOTEBOOK first/notebook.ipynb
(cd first; {first})
{install}[notebooks,cli]
$PYTHON -m pip check
(cd program; $PYTHON -m nbtoolkit run $NOTEBOOK --output done.ipynb)
cp $NOTEBOOK plain
cd plain
$PYTHON -m pytest -q -p no:cacheprovider --rootdir . --nbval --nbval-current-env \
    --nbval-sanitize-with {nbval} --nbval-cell-timeout 280 $(basename $NOTEBOOK)
"""


@pytest.fixture(scope="session", params=["kaggle", "colab"])
def host(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def image(host: str) -> Path:
    return image_venv(host)


@pytest.fixture(scope="session")
def wheels(host: str, image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(host) / "wheels"
    return make_bundle(host, folder, image=image / "freeze.txt")[0].parent


@pytest.fixture
def room(host: str, image: Path, wheels: Path, tmp_path: Path) -> Room:
    return Room(host=host, venv=image / "venv", wheels=wheels, folder=tmp_path)


def install(room: Room) -> str:
    """The shell's words that install from the bundle alone."""
    own = next(room.wheels.glob("nbtoolkit_torch-*.whl"))
    return f"$PYTHON -m pip install -q --no-index --find-links {room.wheels} {own}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_the_bundle_alone_then_as_a_program_then_under_nbval(
    notebook: Path, room: Room, tmp_path: Path
) -> None:
    quick = with_parameters(read_as_saved(notebook), QUICK.get(notebook.stem, {}))
    nbformat.write(quick, tmp_path / notebook.name)
    # Colab's folder has the wheels itself, and the notebook lies beside them.
    bring = "cp *.whl first" if room.host == "colab" else ""
    script = PASSES.format(first=FIRST[room.host], nbval=NBVAL, bring=bring, install=install(room))
    done = room.run(f"NOTEBOOK={tmp_path / notebook.name}\n{script}")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]

    for copy in ("first/executed.ipynb", "program/done.ipynb"):
        cells = nbformat.read(room.results / copy, as_version=4).cells
        assert not [out for cell in cells for out in cell.get("outputs", ()) if "ename" in out]
    assert (room.results / "program/done.html").stat().st_size > 100_000
    record = json.loads((room.results / "program/done.run.json").read_text())
    assert record["status"] == "completed"


def test_the_host_is_recognised_with_its_folders(room: Room) -> None:
    show = "import nbtoolkit as nb; host = nb.detect_host(); print(host.kind, host.working)"
    closed = "! touch /kaggle/input/wheels/x" if room.host == "kaggle" else "true"
    done = room.run(f'{install(room)}\n{closed}\n$PYTHON -c "{show}"')
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-2:] == [room.host, WORKING[room.host]]


def test_there_is_no_internet_in_a_room(room: Room) -> None:
    done = room.run("$PYTHON -m pip download --retries 0 six")
    assert "No matching distribution" in done.stderr
