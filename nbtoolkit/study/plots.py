"""Plot a study's history, importances, and the value by each parameter.

Matplotlib figures out of the study's trials alone: they work on a sweep that goes on, and on any
Optuna study. More of them are in Optuna (``optuna.visualization.matplotlib``) and in
optuna-dashboard, which opens the sweep's ``study.jsonl`` as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from textwrap import fill
from typing import TYPE_CHECKING, Any

from nbtoolkit.errors import MissingExtra, SweepError
from nbtoolkit.study.importance import importance
from nbtoolkit.text_table import shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna import Study
    from optuna.trial import FrozenTrial


# --- labels ---
# Names as they stand in a plot or a table's head: in one line, short, and no formulas.


def plain(text: str, length: int = 28) -> str:
    """A name for a plot, where two dollar signs would enclose a formula."""
    return shortened(text, length).replace("$", r"\$")


# --- plots ---


COLOURS = ("#2a7fc9", "#d55e00", "#009e73", "#8a63d2", "#a07800", "#c44e9b", "#0f8f9f", "#b5651d")
"""Of lines and bars: each has a contrast of 3 and more to white, #111111 and #1e1e1e, as
https://www.w3.org/TR/WCAG21/#non-text-contrast wants it of graphics."""

# Dark grey on nothing: a light page shows it as it is, a dark one puts a white card behind it.
STYLE: dict[Any, Any] = {
    **{f"{part}.color": "#777" for part in ("text", "xtick", "ytick")},
    **{"axes.edgecolor": "#777", "axes.labelcolor": "#777", "axes.facecolor": "none"},
    "figure.facecolor": "none",
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
}

_CHOICE, _CHOICES = 20, 24  # letters of one choice; of all that stand side by side below a panel
_LINE = 64  # characters of a line below a panel
_WIDTH, _HEIGHT, _IN_A_ROW = 3.4, 3.0, 4  # inches of a panel; panels side by side


def plot_history(study: Study, *, metric: str = "value", objective: int = 0) -> Figure:
    """Each trial's value by its number, with the best so far; pruned ones by their last report.

    Args:
        study: the study.
        metric: what the value is called.
        objective: which of several objectives.

    Returns:
        A figure that no other plot draws into; a cell shows it when it is its last value.

    Raises:
        SweepError: no trial has ended well yet.
        MissingExtra: Matplotlib is not installed.
    """
    trials = _complete(study, 1)
    values = [trial.values[objective] for trial in trials]
    best = _best_so_far(trials, objective, study.directions[objective].name)
    pruned = _pruned(study) if objective == 0 else []  # what they reported is the first one's
    figure, [panel] = _panels(1, width=2)
    panel.plot([trial.number for trial in trials], values, "o", markersize=4, label="complete")
    if pruned:
        panel.plot(*zip(*pruned, strict=True), "x", markersize=4, color="#888", label="pruned")
    panel.step([number for number, _ in best], [v for _, v in best], where="post", label="best")
    panel.set(xlabel="trial", ylabel=plain(metric))
    panel.locator_params(axis="x", integer=True)
    # beside the panel, where it lies over no trial
    panel.legend(frameon=False, labelcolor="#777", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def plot_importances(study: Study, *, metric: str = "value", objective: int = 0) -> Figure:
    """How much of the value's variance each parameter explains, with ranges and what is doubtful.

    See :func:`nbtoolkit.study.importance.importance` for how they are computed.

    Args:
        study: the study.
        metric: what the value is called.
        objective: which of several objectives.

    Returns:
        A figure that no other plot draws into.

    Raises:
        SweepError: fewer than ten trials are complete, or all have the same value.
        MissingExtra: Matplotlib or scikit-learn is not installed.
    """
    maximize = study.directions[objective].name == "MAXIMIZE"
    trials = study.get_trials(deepcopy=False)
    found = importance(trials, maximize=maximize, objective=objective)
    shares = found.shares[::-1]  # the largest is on top
    figure, [panel] = _panels(1, width=2)
    values = [one.value for one in shares]
    below = [one.value - one.low for one in shares]
    above = [one.high - one.value for one in shares]
    panel.barh(range(len(shares)), values, xerr=[below, above], ecolor="#777", capsize=3)
    panel.set_yticks(range(len(shares)), [f"{plain(one.name)}  {one.text}" for one in shares])
    # two dollar signs would enclose a formula
    notes = [fill(note.replace("$", r"\$"), _LINE) for note in found.notes()]
    panel.set_xlabel("\n".join([f"importance for {plain(metric)}", *notes]))
    return figure


def plot_slices(
    study: Study,
    *,
    params: Sequence[str] | None = None,
    metric: str = "value",
    objective: int = 0,
) -> Figure:
    """The value by each parameter, a panel each: first trials are grey, the last ones orange.

    A panel is as wide as the space.

    Args:
        study: the study.
        params: which parameters; None: all of them.
        metric: what the value is called.
        objective: which of several objectives.

    Returns:
        A figure that no other plot draws into.

    Raises:
        SweepError: no trial has ended well yet, or a parameter is unknown.
        MissingExtra: Matplotlib is not installed.
    """
    trials = _complete(study, 1)
    known = list(dict.fromkeys(name for trial in trials for name in trial.params))
    names = list(params) if params is not None else known
    if unknown := [name for name in names if name not in known]:
        raise SweepError(
            f"no trial has a parameter {', '.join(map(repr, unknown))}",
            allowed=", ".join(known),
            do="choose some of these, or leave params out",
        )
    figure, panels = _panels(len(names))
    for name, panel in zip(names, panels, strict=True):
        _slice(panel, name, [trial for trial in trials if name in trial.params], objective)
    panels[0].set_ylabel(plain(metric))
    return figure


def _slice(panel: Axes, name: str, trials: Sequence[FrozenTrial], objective: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    distribution: Any = trials[-1].distributions[name]
    values: list[Any] = [trial.params[name] for trial in trials]
    if hasattr(distribution, "choices"):
        values = [plain(str(value), _CHOICE) for value in values]
    elif getattr(distribution, "log", False):
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter("")  # over two decades and less its labels overlap
    panel.scatter(
        values,
        [trial.values[objective] for trial in trials],
        c=[trial.number for trial in trials],
        cmap=LinearSegmentedColormap.from_list("age", ["#888888", "#ff7f0e"]),
        edgecolors="#777",
        linewidths=0.5,
        s=20,
        clip_on=False,
    )
    if hasattr(distribution, "low") and distribution.low < distribution.high:
        panel.set_xlim(distribution.low, distribution.high)  # what was searched, found or not
    panel.margins(x=0.1)
    panel.set_xlabel(plain(name))
    if hasattr(distribution, "choices") and len("".join(set(values))) > _CHOICES:
        panel.tick_params(axis="x", rotation=30)
        for label in panel.get_xticklabels():
            label.set_horizontalalignment("right")


def _complete(study: Study, least: int) -> list[FrozenTrial]:
    """The trials that have a value, by number."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if len(trials) < least:
        raise SweepError(
            f"{len(trials)} trials of the study {study.study_name!r} have ended well",
            allowed=f"at least {least} for this plot",
            do="wait for more trials, or look at .trials for how they ended",
        )
    return trials


def _pruned(study: Study) -> list[tuple[int, float]]:
    """Number and last report of the trials that were ended early."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    reports = [(trial.number, trial.intermediate_values) for trial in trials]
    return [(number, values[max(values)]) for number, values in reports if values]


def _best_so_far(
    trials: Sequence[FrozenTrial], objective: int, direction: str
) -> list[tuple[int, float]]:
    """Number and value of the best trial at every trial; those that keep a constraint count."""
    choose = max if direction == "MAXIMIZE" else min
    feasible = [trial for trial in trials if _feasible(trial)]
    values = accumulate((trial.values[objective] for trial in feasible), choose)
    return [(trial.number, value) for trial, value in zip(feasible, values, strict=True)]


def _feasible(trial: FrozenTrial) -> bool:
    """Whether every constraint is at most 0; Optuna keeps them as one list, or (5) by name."""
    kept = [v for key, v in trial.system_attrs.items() if key.partition(":")[0] == "constraints"]
    values = [one for value in kept for one in (value if isinstance(value, list) else [value])]
    return all(value <= 0 for value in values)


def _panels(count: int, width: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels.

    It is taken from pyplot, which makes notebooks show figures, and given back at once: else a cell
    would show it twice, and a kernel would keep every figure it ever drew.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra(
            f"Matplotlib cannot be imported: {error}", do="pip install matplotlib"
        ) from error
    across = min(count, _IN_A_ROW) or 1
    down = -(-count // across) or 1
    size = (_WIDTH * width * across, _HEIGHT * down)
    with pyplot.rc_context(STYLE):
        figure, grid = pyplot.subplots(
            down, across, figsize=size, squeeze=False, sharey=True, layout="tight"
        )
    pyplot.close(figure)
    panels = list(grid.flat)
    for unused in panels[max(count, 1) :]:
        unused.remove()
    return figure, panels[: max(count, 1)]
