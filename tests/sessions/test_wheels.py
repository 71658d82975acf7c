"""`nbtoolkit bundle`: the wheels that a host lacks, and a folder of them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import nbtoolkit
from nbtoolkit.errors import MissingExtra, WheelsError
from nbtoolkit.sessions.wheels import (
    EXTRAS,
    NEVER,
    Image,
    Wheel,
    host_image,
    make_bundle,
    missing_requirements,
    own_wheel,
    read_image,
    read_wheel,
)

ROOT = Path(__file__).resolve().parents[2]

Index = Callable[..., Wheel]


def image(python: str = "3.12", **packages: str) -> Image:
    return Image(name="some image", python=python, packages=packages)


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> Wheel:
    """Write a wheel that contains its metadata only."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    extras = re.findall(r"extra == '(\w+)'", " ".join(requires))
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    path = folder / f"{module}-{version}-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", "\n".join([*lines, ""]))
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return read_wheel(path)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Adds wheels to a folder, which is the only source of wheels."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return lambda *words: write_wheel(folder, *words)


def test_what_a_host_lacks_comes_with_what_that_needs(index: Index) -> None:
    own = index("nbtoolkit", "1", "numpy>=1.26", "mlflow>=2; extra == 'tracking'", "torch>=2.6")
    index("mlflow", "3", "flask<4", "numpy")
    index("flask", "3")
    host = image(numpy="2.0.2", torch="2.10.0+cu128")
    assert missing_requirements(own, ["tracking"], host) == ["flask==3", "mlflow==3"]
    assert missing_requirements(own, [], host) == []


def test_what_is_too_old_there_is_brought_along_and_what_is_of_an_unknown_version_is_not(
    index: Index,
) -> None:
    own = index("nbtoolkit", "1", "typer>=0.12", "optuna>=4")
    index("typer", "0.24")
    assert missing_requirements(own, [], image(typer="0.9", optuna="")) == ["typer==0.24"]


def test_all_that_is_asked_of_one_name_is_met_by_one_wheel(index: Index) -> None:
    own = index("nbtoolkit", "1", "one", "two", "three>=2")
    index("one", "1", "three<4")
    index("two", "1", "three!=3")
    for version in ("2", "3", "4"):
        index("three", version)
    found = missing_requirements(own, [], image(three="5"))
    assert found == ["one==1", "three==2", "two==1"]


def test_extras_of_extras_and_markers_are_those_of_the_host(index: Index) -> None:
    extras = ("nbtoolkit-torch[b]; extra == 'a'", "served[fast]; extra == 'b'")
    own = index("nbtoolkit-torch", "1", *extras)
    markers = ("old; python_version < '3.12'", "win; sys_platform == 'win32'")
    index("served", "1", "uv; extra == 'fast'", *markers)
    index("uv", "1")
    index("old", "1")
    assert missing_requirements(own, ["a"], image()) == ["served==1", "uv==1"]
    older = missing_requirements(own, ["a"], image(python="3.11"))
    assert older == ["old==1", "served==1", "uv==1"]


@pytest.mark.parametrize("there", [{}, {"torch": "2.1.0"}])
def test_torch_is_never_brought_along(there: dict[str, str], index: Index) -> None:
    own = index("nbtoolkit", "1", "torch>=2.6")
    index("torch", "2.9")
    with pytest.raises(WheelsError, match=r"has (no torch|torch 2\.1\.0), which does not meet"):
        missing_requirements(own, [], image(**there))


def test_uv_is_an_extra(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    own = index("nbtoolkit", "1")
    monkeypatch.setitem(sys.modules, "uv", None)
    with pytest.raises(MissingExtra, match=r"needs uv\n.*pip install 'uv>="):
        missing_requirements(own, [], image())


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return own_wheel(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("host", ["kaggle", "colab"])
def test_the_hosts_that_are_known_lack_little(host: str, own: Wheel, index: Index) -> None:
    """Each of these is there in a wheel that needs nothing; of others there is none."""
    few = {"mlflow", "cmaes", "pytorch-metric-learning"}
    if host == "colab":
        few |= {"ipywidgets", "optuna", "papermill", "torchmetrics"}
    for name in few:
        index(name, "999")
    pins = missing_requirements(own, EXTRAS, host_image(host))
    assert pins == sorted(f"{name}==999" for name in few)
    assert not few & set(NEVER)


def everything_there(own: Wheel, file: Path) -> Path:
    """An image that lacks nothing, in a file."""
    with zipfile.ZipFile(own.path) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    names = re.findall(r"^Requires-Dist: ([\w.-]+)", text, re.MULTILINE)
    file.write_text("\n".join(["# python 3.12", *names]))
    return file


def test_a_folder_is_filled_and_an_older_bundle_in_it_goes(own: Wheel, tmp_path: Path) -> None:
    there = everything_there(own, tmp_path / "image.txt")
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "mlflow-1-py3-none-any.whl").touch()
    made = make_bundle(output=folder, image=there, wheel=own.path, user="me")
    inside = {entry.name for entry in made.folder.iterdir()}
    assert inside == {own.path.name, "dataset-metadata.json"}
    assert made.explain().startswith("1 wheel, ")
    assert f"kaggle datasets create -p {folder}" in made.explain()
    again = make_bundle(output=folder, image=there, wheel=folder / own.path.name)
    assert again.wheels[0].path.is_file()


def test_wheels_are_fetched_into_the_folder(own: Wheel, index: Index, tmp_path: Path) -> None:
    there = everything_there(own, tmp_path / "image.txt")
    there.write_text(there.read_text().replace("mlflow\n", "") + "\nflask==3")
    index("mlflow", "999", "flask>=4")
    index("flask", "4")
    made = make_bundle(output=tmp_path / "wheels", image=there, wheel=own.path)
    names = [wheel.path.name for wheel in made.wheels]
    assert names == [own.path.name, "flask-4-py3-none-any.whl", "mlflow-999-py3-none-any.whl"]
    assert {entry.name for entry in made.folder.iterdir()} == set(names)
    assert made.replaced == ["flask 3 -> 4"]


def test_our_wheel_is_made_of_the_checkout(own: Wheel) -> None:
    assert (own.name, str(own.version)) == ("nbtoolkit-torch", nbtoolkit.__version__)
    with zipfile.ZipFile(own.path) as archive:
        inside = set(archive.namelist())
    assert {"nbtoolkit/sessions/images/kaggle.txt", "nbtoolkit/_config/train.yaml"} <= inside


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: make_bundle("kagle", f / "out"), "'kagle' are not known\n.*colab, kaggle"),
        (lambda f: make_bundle(image=f / "none.txt"), r"none\.txt cannot be read: No such file"),
        (lambda f: make_bundle(image=f / "freeze.txt"), "does not say which Python it has"),
        (lambda f: make_bundle(image=f / "empty.txt"), "does not say which packages it has"),
        (lambda f: make_bundle(output=f), r"contains other files than wheels: empty\.txt"),
        (lambda f: make_bundle(output=f / "out", wheel=f / "freeze.txt"), "is no wheel"),
        (lambda f: read_wheel(f / "a-1-py3-none-any.whl"), "is no wheel: .*No such file"),
    ],
)
def test_a_wrong_call_is_refused(
    call: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "freeze.txt").write_text("numpy==2.0.2\n")
    (tmp_path / "empty.txt").write_text("# python 3.12\n")
    with pytest.raises(WheelsError, match=message):
        call(tmp_path)


def test_an_image_is_read_as_pip_prints_it(tmp_path: Path) -> None:
    lines = ["# python 3.11", "PyYAML==6.0.3", "torch==2.10.0+cu128", "-e git+https://x#egg=y"]
    lines += ["google_colab @ file:///x.tar.gz", "optuna", "# a word", "", "WARNING: old"]
    (tmp_path / "image.txt").write_text("\n".join(lines))
    read = read_image(tmp_path / "image.txt")
    assert read.python == "3.11"
    assert read.packages == {
        "pyyaml": "6.0.3",
        "torch": "2.10.0+cu128",
        "google-colab": "",
        "optuna": "",
    }


def test_the_command_reports_why_uv_failed(own: Wheel, tmp_path: Path) -> None:
    """Nothing is downloaded: there is no index."""
    there = everything_there(own, tmp_path / "image.txt")
    there.write_text(there.read_text().replace("mlflow\n", ""))
    program = [sys.executable, "-m", "nbtoolkit", "bundle", "--image", str(there)]
    done = subprocess.run(
        [*program, "--wheel", str(own.path)],
        cwd=tmp_path,
        env={"PATH": "", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "uv pip install failed:" in done.stderr
    assert "Because mlflow was not found in the provided package locations" in done.stderr
    assert not (tmp_path / "outputs").exists()
