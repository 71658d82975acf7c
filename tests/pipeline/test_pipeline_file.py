"""The file of a pipeline: allowed content and reports of mistakes. No kernel starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pipelines import write_pipeline, write_two_steps
from programs import write_program

import nbtoolkit as nb
from nbtoolkit.errors import PipelineError
from nbtoolkit.notebooks.parameters import FromShell
from nbtoolkit.notebooks.pipeline_file import load_pipeline, references, resolve, values_of

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "sweep": {"best": {"optim.lr": 0.1, "model": {"hidden": 8}}, "value": 0.5, "name": "a b"},
    "pipeline": {"folder": "/out"},
}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${sweep.best}", {"optim.lr": 0.1, "model": {"hidden": 8}}),
        ("${sweep.best.optim.lr}", 0.1),
        ("${sweep.best.model.hidden}", 8),
        (" ${ sweep.value } ", 0.5),
        ("${sweep.value} of ${sweep.name}", "0.5 of a b"),
        ("${pipeline.folder}/runs", "/out/runs"),
        ("$${sweep.value} and ${sweep.value}", "${sweep.value} and 0.5"),
        ("$${HOME}", "${HOME}"),
        ("$HOME {x}", "$HOME {x}"),
        ({"a": ["${sweep.value}", 1], "b": None}, {"a": [0.5, 1], "b": None}),
    ],
)
def test_references_stand_for_published_values(written: object, value: object) -> None:
    assert resolve(written, PUBLISHED) == value


def test_a_text_of_a_shell_stays_one() -> None:
    text = resolve(FromShell("${sweep.name}7"), PUBLISHED)
    assert (text, type(text)) == ("a b7", FromShell)
    assert references(["${a.b}", {"c": "x ${ d.e } ${f.g}"}]) == ["a.b", "d.e", "f.g"]


def mistakes(folder: Path, text: str, **options: object) -> str:
    path = folder / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(PipelineError) as caught:
        load_pipeline(path, **options)
    return str(caught.value).replace(f"{folder}/", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "steps:\n  use: {notbook: use.ipynb}",
            "wrong.yaml:2: unknown setting 'notbook' (allowed: notebook, parameters, after",
        ),
        ("stepps: {}", "wrong.yaml:1: unknown setting 'stepps'"),
        ("folder: x", "wrong.yaml: has no steps\n  Allowed: `steps:`"),
        ("steps: [use]", "wrong.yaml:1: has no steps\n  Allowed: `steps:`"),
        ("steps:\n  a b: {}", "wrong.yaml:2: 'a b' cannot be a step's name"),
        ("steps:\n  pipeline: {}", "wrong.yaml:2: 'pipeline' cannot be a step's name"),
        (
            "steps:\n  use: use.ipynb",
            "wrong.yaml:2: the step 'use' is 'use.ipynb'\n  Allowed: `",
        ),
        (
            "steps:\n  use:\n    after: []",
            "wrong.yaml:2: steps.use.notebook: Field required\n  Allowed: The notebook: beside",
        ),
        (
            "steps:\n  use:\n    notebook: us.ipynb",
            "wrong.yaml:3: there is no notebook 'us.ipynb'\n  Allowed: a file in one of ",
        ),
        (
            "steps:\n  use:\n    notebook: wrong.yaml",
            "wrong.yaml:3: the notebook wrong.yaml cannot be read: not a notebook",
        ),
        (
            "steps:\n  use:\n    notebook: use.ipynb\n    timeout: soon",
            "wrong.yaml:4: steps.use.timeout: Value error, not a duration",
        ),
        (
            "steps:\n  use:\n    notebook: use.ipynb\n    parameters:\n      settngs: {}",
            "wrong.yaml:5: use.ipynb has no parameter 'settngs'\n  Allowed: settings, said\n"
            "  Do now:  did you mean 'settings'?",
        ),
        (
            "steps:\n  use: {notebook: use.ipynb, parameters: {said: 5}}",
            "wrong.yaml:2: said is 5\n  Allowed: str",
        ),
        (
            "steps:\n  find: {notebook: find.ipynb}\n"
            "  use: {notebook: use.ipynb, parameters: {said: 'is ${fnd.score}'}}",
            "wrong.yaml:3: ${fnd.score}: there is no step 'fnd'\n  Allowed: find, use\n"
            "  Do now:  did you mean 'find'?",
        ),
        (
            "steps:\n  use: {notebook: use.ipynb, parameters: {said: '${find}'}}",
            "${find} refers to no value\n  Do now:  write ${step.name}, or $${...}",
        ),
        (
            "steps:\n  use: {notebook: use.ipynb, parameters: {said: '${pipeline.foldr}'}}",
            "there is no ${pipeline.foldr}\n  Allowed: ${pipeline.folder}, ${pipeline.name}",
        ),
        (
            "steps:\n  find: {notebook: find.ipynb}\n"
            "  use:\n    notebook: use.ipynb\n    after: fid",
            "wrong.yaml:5: there is no step 'fid'\n  Allowed: find, use\n  Do now:  did you mean",
        ),
        (
            "steps:\n  find: {notebook: find.ipynb, parameters: {tag: '${use.said}'}}\n"
            "  use: {notebook: use.ipynb, after: find}",
            "steps need each other in a circle: find needs use needs find",
        ),
        (
            "steps:\n  use: {notebook: use.ipynb, after: use}",
            "steps need each other in a circle: use needs use",
        ),
        (
            "steps:\n  use: {notebook: use.ipynb}\n  use: {notebook: find.ipynb}",
            "wrong.yaml:3: 'steps.use' is given twice, first in line 2",
        ),
    ],
)
def test_a_mistake_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    assert message in mistakes(tmp_path, text)


def test_all_mistakes_are_told_at_once_by_their_lines(tmp_path: Path) -> None:
    write_two_steps(tmp_path)
    text = "steps:\n  a: {}\n  b: {notebook: use.ipynb, aftr: a}\n  c: {notebook: no.ipynb}"
    told = mistakes(tmp_path, text, overrides=["d.x=1", "a", "b.=2"])
    assert told.startswith("6 mistakes")
    places = [line.split(": ")[0].strip() for line in told.splitlines()[1:]]
    assert places[:3] == ["wrong.yaml:2", "wrong.yaml:3", "wrong.yaml:4"]
    assert sorted(places[3:]) == ["override 'a'", "override 'b.=2'", "override 'd.x=1'"]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["n = 1", "n = 2"], "two.ipynb has 2 cells tagged 'parameters': code cells 1 and 2"),
        (["n = = 1"], "two.ipynb: code cell 1 is not Python"),
    ],
)
def test_a_notebooks_parameters_cell_is_looked_at_first(
    cells: list[str], message: str, tmp_path: Path
) -> None:
    path = write_program(tmp_path, *cells, name="two")
    notebook = json.loads(path.read_text())
    for cell in notebook["cells"]:
        cell["metadata"]["tags"] = ["parameters"]
    path.write_text(json.dumps(notebook))
    assert message in mistakes(tmp_path, "steps:\n  one: {notebook: two.ipynb}")


def test_overrides_go_before_the_file_and_are_typed_by_the_notebook(tmp_path: Path) -> None:
    path = write_two_steps(tmp_path)
    pipeline = load_pipeline(path, ["find.tag=007", "find.n=7", "use.said=${find.tag}!"])
    assert [step.name for step in pipeline.steps] == ["find", "use"]
    assert values_of(pipeline.steps[0], {}) == {"n": 7, "tag": "007"}
    published = {"find": {"tag": "007", "best": {}, "score": 1}}
    assert values_of(pipeline.steps[1], published) == {"settings": {}, "said": "007!"}
    with pytest.raises(PipelineError, match=r"override 'find\.n': n is 'x'\n  Allowed: int"):
        load_pipeline(path, {"find.n": "x"})


@pytest.mark.parametrize(
    ("published", "message"),
    [
        (
            {"bst": {}, "score": 1},
            r"two.yaml:5: \$\{find.best\}: the step 'find' published no 'best'\n"
            r"  Allowed: bst, score\n  Do now:  did you mean 'bst'\?",
        ),
        ({"best": 3, "score": 1}, "two.yaml:5: settings is 3\n  Allowed: dict"),
        ({"best": {}, "score": [1]}, "a list cannot be part of a text\n  Do now:  make the refer"),
        ({"best": {}}, "allowed: best|Allowed: best"),
        ({}, "Allowed: nothing: it published nothing|allowed: nothing: it published nothing"),
    ],
)
def test_a_value_that_was_not_published_or_does_not_fit_is_told(
    published: dict[str, object], message: str, tmp_path: Path
) -> None:
    step = load_pipeline(write_two_steps(tmp_path)).steps[1]
    with pytest.raises(PipelineError, match=message):
        values_of(step, {"find": published})


def test_steps_keep_the_files_order_where_nothing_speaks_against_it(tmp_path: Path) -> None:
    write_program(tmp_path, "1", name="one")
    after = {"a": [], "b": ["d"], "c": [], "d": ["a"]}
    path = write_pipeline(
        tmp_path,
        **{name: {"notebook": "one.ipynb", "after": needs} for name, needs in after.items()},
    )
    steps = load_pipeline(path).steps
    assert [step.name for step in steps] == ["a", "c", "d", "b"]


def test_the_folder_is_the_calls_or_the_files_or_named_after_it(tmp_path: Path) -> None:
    path = write_two_steps(tmp_path)
    assert load_pipeline(path).folder == Path("outputs/two").absolute()
    path.write_text(f"folder: {tmp_path}/mine\n{path.read_text()}")
    assert load_pipeline(path).folder == tmp_path / "mine"
    assert load_pipeline(path, folder=tmp_path / "other").folder == tmp_path / "other"


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/pipeline/*.yaml")), ids=lambda p: p.stem)
def test_the_pipelines_that_ship_are_right(path: Path) -> None:
    steps = load_pipeline(path).steps
    assert [step.name for step in steps][:3] == ["sweep", "cross-validate", "train"]


def test_a_missing_file_and_an_unknown_step_to_run_again_are_refused(tmp_path: Path) -> None:
    with pytest.raises(nb.errors.ConfigError, match=r"no configuration file 'nope.yaml'"):
        nb.run_pipeline("nope.yaml")
    with pytest.raises(PipelineError, match="again 'usee': there is no such step\n  Allowed: find"):
        nb.run_pipeline(write_two_steps(tmp_path), folder=tmp_path / "out", again=["usee"])
