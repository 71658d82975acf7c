"""`nbtoolkit bundle`: which wheels a host lacks, and a folder of them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import nbtoolkit
from nbtoolkit.errors import WheelsError
from nbtoolkit.kaggle.bundle import EXTRAS, make_bundle
from nbtoolkit.kaggle.image import (
    NEVER,
    Image,
    Wheel,
    host_image,
    missing_wheels,
    own_wheel,
    read_image,
    read_wheel,
)

ROOT = Path(__file__).resolve().parents[2]


def wheel(name: str, version: str, *requires: str) -> Wheel:
    requirements = tuple(map(Requirement, requires))
    path = Path(f"{name}-{version}-py3-none-any.whl")
    return Wheel(path=path, name=name, version=Version(version), requires=requirements)


def image(python: str = "3.12", **packages: str) -> Image:
    return Image(name="some image", python=python, packages=packages)


class Index:
    """What could be fetched, the newest last; remembers what was."""

    def __init__(self, *wheels: Wheel) -> None:
        self.wheels = wheels
        self.asked: list[str] = []

    def __call__(self, wanted: Iterable[Requirement]) -> list[Wheel]:
        self.asked += map(str, wanted)
        return [
            next(
                w
                for w in reversed(self.wheels)
                if w.name == one.name and w.version in one.specifier
            )
            for one in wanted
        ]


def names(found: list[Wheel]) -> list[str]:
    return [f"{one.name}-{one.version}" for one in found]


def test_what_a_host_lacks_comes_with_what_that_needs() -> None:
    own = wheel("nbtoolkit", "1", "numpy>=1.26", "mlflow>=2; extra == 'tracking'", "torch>=2.6")
    index = Index(wheel("mlflow", "3", "flask<4", "numpy"), wheel("flask", "3"))
    host = image(numpy="2.0.2", torch="2.10.0+cu128")
    assert names(missing_wheels(own, ["tracking"], host, index)) == ["flask-3", "mlflow-3"]
    assert missing_wheels(own, [], host, index) == []


def test_what_is_too_old_there_is_brought_along_and_what_is_of_an_unknown_version_is_not() -> None:
    own = wheel("nbtoolkit", "1", "typer>=0.12", "optuna>=4")
    index = Index(wheel("typer", "0.24"))
    assert names(missing_wheels(own, [], image(typer="0.9", optuna=""), index)) == ["typer-0.24"]


def test_all_that_is_asked_of_one_name_is_met_by_one_wheel() -> None:
    own = wheel("nbtoolkit", "1", "one", "two", "three>=2")
    three = [wheel("three", str(n)) for n in (2, 3, 4)]
    index = Index(wheel("one", "1", "three<4"), wheel("two", "1", "three!=3"), *three)
    assert names(missing_wheels(own, [], image(three="5"), index)) == ["one-1", "three-2", "two-1"]


def test_extras_of_extras_and_markers_are_those_of_the_host() -> None:
    extras = ("nbtoolkit-torch[b]; extra == 'a'", "served[fast]; extra == 'b'")
    own = wheel("nbtoolkit-torch", "1", *extras)
    served = wheel(
        "served",
        "1",
        "uv; extra == 'fast'",
        "old; python_version < '3.12'",
        "win; sys_platform == 'win32'",
    )
    index = Index(served, wheel("uv", "1"), wheel("old", "1"))
    assert names(missing_wheels(own, ["a"], image(), index)) == ["served-1", "uv-1"]
    older = missing_wheels(own, ["a"], image(python="3.11"), index)
    assert names(older) == ["old-1", "served-1", "uv-1"]


@pytest.mark.parametrize("there", [{}, {"torch": "2.1.0"}])
def test_torch_is_never_brought_along(there: dict[str, str]) -> None:
    own = wheel("nbtoolkit", "1", "torch>=2.6")
    with pytest.raises(WheelsError, match=r"(no torch|torch 2\.1\.0), and nbtoolkit needs torch>"):
        missing_wheels(own, [], image(**there), Index())


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return own_wheel(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize("host", ["kaggle", "colab"])
def test_the_hosts_that_are_known_lack_little(host: str, own: Wheel) -> None:
    """Nothing is fetched: what is asked for gets a wheel that needs nothing."""
    asked: list[str] = []

    def fetch(wanted: list[Requirement]) -> list[Wheel]:
        asked.extend(one.name for one in wanted)
        return [wheel(one.name, "999") for one in wanted]

    missing_wheels(own, EXTRAS, host_image(host), fetch)
    few = {"mlflow", "cmaes", "pyflakes"}
    assert set(asked) == (
        few if host == "kaggle" else few | {"ipywidgets", "optuna", "papermill", "torchmetrics"}
    )
    assert not set(asked) & set(NEVER)


def everything_there(own: Wheel, file: Path) -> Path:
    """An image that lacks nothing, in a file."""
    lines = [re.split(r"[\[<>=!;\s]", str(one))[0] for one in own.requires]
    file.write_text("\n".join(["# python 3.12", *lines]))
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


def test_our_wheel_is_made_of_the_checkout(own: Wheel) -> None:
    assert (own.name, str(own.version)) == ("nbtoolkit-torch", nbtoolkit.__version__)
    with zipfile.ZipFile(own.path) as archive:
        inside = set(archive.namelist())
    assert {"nbtoolkit/kaggle/images/kaggle.txt", "nbtoolkit/_config/train.yaml"} <= inside


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: make_bundle("kagle", f / "out"), "'kagle' holds is not known\n.*colab, kaggle"),
        (lambda f: make_bundle(image=f / "none.txt"), r"none\.txt cannot be read: No such file"),
        (lambda f: make_bundle(image=f / "freeze.txt"), "does not say which Python it is of"),
        (lambda f: make_bundle(image=f / "empty.txt"), "does not say what packages it holds"),
        (lambda f: make_bundle(output=f), r"holds other things than wheels: empty\.txt"),
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
    assert read.has(Requirement("torch>=2.6"))
    assert not read.has(Requirement("pyyaml>=7"))


def test_the_command_says_why_pip_cannot(own: Wheel, tmp_path: Path) -> None:
    """Nothing is reached: pip is told of no index but an empty folder."""
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
    assert "pip download failed:" in done.stderr
    assert "No matching distribution found for mlflow" in done.stderr
    assert not (tmp_path / "outputs").exists()
