"""`nbtoolkit bundle`: the wheels that a host lacks, and a folder of them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import nbtoolkit
from nbtoolkit.errors import WheelsError
from nbtoolkit.sessions.wheels import (
    EXTRAS,
    Image,
    download_lacking,
    explain,
    host_image,
    make_bundle,
    own_wheel,
    read_image,
)

ROOT = Path(__file__).resolve().parents[2]

Index = Callable[..., Path]


def image(python: str = "3.12", **packages: str) -> Image:
    return Image(name="some image", python=python, packages={"torch": "2.10.0", **packages})


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
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
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """Adds wheels to a folder, which is the only source of wheels."""
    folder = tmp_path / "index"
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return lambda *words: write_wheel(folder, *words)


def lacking(own: Path, extras: Sequence[str], host: Image, folder: Path) -> list[str]:
    wheels = download_lacking(own, host, folder / "lacking", extras)
    return [
        "==".join(path.name.replace("_", "-").split("-py3-")[0].rsplit("-", 1)) for path in wheels
    ]


def test_what_a_host_lacks_comes_with_what_that_needs(index: Index, tmp_path: Path) -> None:
    own = index("nbtoolkit", "1", "numpy>=1.26", "mlflow>=2; extra == 'tracking'", "torch>=2.6")
    index("mlflow", "3", "flask<4", "numpy")
    index("flask", "3")
    host = image(numpy="2.0.2", torch="2.10.0+cu128")
    assert lacking(own, ["tracking"], host, tmp_path) == ["flask==3", "mlflow==3"]


def test_a_host_that_lacks_nothing_gets_nothing(index: Index, tmp_path: Path) -> None:
    own = index("nbtoolkit", "1", "numpy>=1.26")
    assert lacking(own, [], image(numpy="2.0.2"), tmp_path) == []


def test_torch_and_cuda_of_the_host_are_not_asked_for_again(index: Index, tmp_path: Path) -> None:
    """The index has the same version, which needs CUDA, and a newer one."""
    own = index("nbtoolkit", "1", "torch>=2.6", "accelerate")
    index("accelerate", "1", "torch>=2")
    index("torch", "2.10.0", "nvidia-cublas")
    index("torch", "2.11.0", "nvidia-cublas")
    assert lacking(own, [], image(torch="2.10.0"), tmp_path) == ["accelerate==1"]


def test_an_older_wheel_that_fits_the_host_is_taken_rather_than_the_newest(
    index: Index, tmp_path: Path
) -> None:
    own = index("nbtoolkit", "1", "mlflow")
    index("mlflow", "3", "flask<4")
    index("mlflow", "4", "flask>=4")
    index("flask", "4")
    assert lacking(own, [], image(flask="3"), tmp_path) == ["mlflow==3"]


def test_a_package_of_an_unknown_version_is_not_brought_along(index: Index, tmp_path: Path) -> None:
    own = index("nbtoolkit", "1", "optuna>=4", "typer")
    index("optuna", "5", "colorlog")
    index("colorlog", "6")
    index("typer", "1")
    assert lacking(own, [], image(optuna=""), tmp_path) == ["colorlog==6", "typer==1"]


def test_what_is_too_old_there_is_brought_along(index: Index, tmp_path: Path) -> None:
    own = index("nbtoolkit", "1", "typer>=0.12", "ipywidgets>=8")
    index("typer", "0.24")
    index("ipywidgets", "8", "widgets>=4")
    index("widgets", "4")
    host = image(typer="0.20", ipywidgets="7", widgets="3")
    assert lacking(own, [], host, tmp_path) == ["ipywidgets==8", "widgets==4"]


@pytest.mark.parametrize("there", [None, "2.1.0"])
def test_torch_is_never_brought_along(there: str | None, index: Index, tmp_path: Path) -> None:
    own = index("nbtoolkit", "1", "torch>=2.6")
    index("torch", "2.9")
    packages = {"torch": there} if there else {}
    with pytest.raises(WheelsError, match=r"has no torch|\(constraint\) torch==2\.1\.0"):
        download_lacking(own, Image(name="x", python="3.12", packages=packages), tmp_path / "x", [])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return own_wheel(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("host", ["kaggle", "colab"])
def test_the_hosts_that_are_known_lack_little(
    host: str, own: Path, index: Index, tmp_path: Path
) -> None:
    """Each of these is there in a wheel that needs nothing; of others there is none."""
    few = {"mlflow", "cmaes", "pytorch-metric-learning"}
    if host == "colab":
        few |= {"ipywidgets", "optuna", "papermill", "torchmetrics"}
    packages = host_image(host)
    unknown = {name for name, version in packages.packages.items() if not version}
    for name in few | unknown:
        index(name, "999")
    pins = lacking(own, EXTRAS, packages, tmp_path)
    assert pins == sorted(f"{name}==999" for name in few)


def everything_there(own: Path, file: Path) -> Path:
    """An image that lacks nothing, in a file."""
    with zipfile.ZipFile(own) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        text = archive.read(metadata).decode()
    names = re.findall(r"^Requires-Dist: ([\w.-]+)", text, re.MULTILINE)
    file.write_text("\n".join(["# python 3.12", *(f"{name}==999" for name in names)]))
    return file


@pytest.mark.usefixtures("index")
def test_a_folder_is_filled_and_an_older_bundle_in_it_goes(own: Path, tmp_path: Path) -> None:
    there = everything_there(own, tmp_path / "image.txt")
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "mlflow-1-py3-none-any.whl").touch()
    made = make_bundle(output=folder, image=there, wheel=own, user="me")
    assert [path.name for path in made] == [own.name]
    assert {entry.name for entry in folder.iterdir()} == {own.name, "dataset-metadata.json"}
    assert explain(made).startswith("1 wheel, ")
    assert f"kaggle datasets create -p {folder}" in explain(made)
    again = make_bundle(output=folder, image=there, wheel=folder / own.name)
    assert again[0].is_file()


def test_wheels_are_fetched_into_the_folder(own: Path, index: Index, tmp_path: Path) -> None:
    there = everything_there(own, tmp_path / "image.txt")
    there.write_text(there.read_text().replace("mlflow==999\n", "") + "\nflask==3")
    index("mlflow", "998", "flask>=4")
    index("flask", "4")
    made = make_bundle(output=tmp_path / "wheels", image=there, wheel=own)
    names = [wheel.name for wheel in made]
    assert names == [own.name, "flask-4-py3-none-any.whl", "mlflow-998-py3-none-any.whl"]
    assert {entry.name for entry in (tmp_path / "wheels").iterdir()} == set(names)


def test_our_wheel_is_made_of_the_checkout(own: Path) -> None:
    assert own.name.startswith(f"nbtoolkit_torch-{nbtoolkit.__version__}-py3")
    with zipfile.ZipFile(own) as archive:
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
        (lambda f: make_bundle(wheel=f / "a-1-py3-none-any.whl"), "is no wheel: .*No such file"),
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


def test_the_command_reports_why_pip_failed(own: Path, tmp_path: Path) -> None:
    """Nothing is downloaded: there is no index."""
    there = everything_there(own, tmp_path / "image.txt")
    there.write_text(there.read_text().replace("mlflow==999\n", ""))
    program = [sys.executable, "-m", "nbtoolkit", "bundle", "--image", str(there)]
    done = subprocess.run(
        [*program, "--wheel", str(own)],
        cwd=tmp_path,
        env={"PATH": "", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "pip download failed:" in done.stderr
    assert "No matching distribution found for mlflow" in done.stderr
    assert not (tmp_path / "outputs").exists()
