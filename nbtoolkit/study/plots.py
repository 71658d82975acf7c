"""Plot a study's history, importances, and the value by each parameter.

The Matplotlib figures need only the study's trials: they work on a running sweep and on any Optuna
study. Optuna has more of them (``optuna.visualization.matplotlib``), and so has optuna-dashboard,
which opens the sweep's ``study.jsonl`` directly.
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

COLOURS = ("#2a7fc9", "#d55e00", "#009e73", "#8a63d2", "#a07800", "#c44e9b", "#0f8f9f", "#b5651d")
"""Of lines and bars. Each has a contrast of at least 3 to white, #111111 and #1e1e1e, as
https://www.w3.org/TR/WCAG21/#non-text-contrast requires of graphics."""

# Grey on transparent: a light page shows it as it is, a dark one puts a white card behind it.
STYLE: dict[Any, Any] = {
    **{f"{part}.color": "#777" for part in ("text", "xtick", "ytick")},
    **{"axes.edgecolor": "#777", "axes.labelcolor": "#777", "axes.facecolor": "none"},
    "figure.facecolor": "none",
    "axes.prop_cycle": f"cycler(color={list(COLOURS)})",
}

_MAX_CHOICE, _MAX_CHOICES = 20, 24  # characters of one choice; of all choices side by side
_LINE = 64  # characters of a line below a panel
_WIDTH, _HEIGHT, _PER_ROW = 3.4, 3.0, 4  # inches of a panel; panels per row


def plain(text: str, length: int = 28) -> str:
    """A name for a plot, in which two dollar signs would enclose a formula."""
    return shortened(text, length).replace("$", r"\$")


def plot_history(study: Study, *, metric: str = "value", objective: int = 0) -> Figure:
    """Plot each trial's value by its number, the best so far, and pruned trials by last report.

    Args:
        study: the study.
        metric: the name of the value.
        objective: index of the objective.

    Returns:
        A new figure; a cell shows it if it is the cell's last value.

    Raises:
        SweepError: no trial is complete yet.
        MissingExtra: Matplotlib is not installed.
    """
    trials = _complete(study)
    values = [trial.values[objective] for trial in trials]
    best = _best_so_far(trials, objective, study.directions[objective].name)
    pruned = _pruned(study) if objective == 0 else []  # they report the first objective
    figure, [panel] = _panels(1, width=2)
    panel.plot([trial.number for trial in trials], values, "o", markersize=4, label="complete")
    if pruned:
        panel.plot(*zip(*pruned, strict=True), "x", markersize=4, color="#888", label="pruned")
    panel.step([number for number, _ in best], [v for _, v in best], where="post", label="best")
    panel.set(xlabel="trial", ylabel=plain(metric))
    panel.locator_params(axis="x", integer=True)
    # beside the panel, where it covers no trial
    panel.legend(frameon=False, labelcolor="#777", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def plot_importances(study: Study, *, metric: str = "value", objective: int = 0) -> Figure:
    """Plot how much of the value's variance each parameter explains, with ranges and notes.

    See :func:`nbtoolkit.study.importance.importance` for the method.

    Args:
        study: the study.
        metric: the name of the value.
        objective: index of the objective.

    Returns:
        A new figure.

    Raises:
        SweepError: fewer than ten trials are complete, or all have the same value.
        MissingExtra: Matplotlib or scikit-learn is not installed.
    """
    maximize = study.directions[objective].name == "MAXIMIZE"
    trials = study.get_trials(deepcopy=False)
    result = importance(trials, maximize=maximize, objective=objective)
    shares = result.shares[::-1]  # the largest is on top
    figure, [panel] = _panels(1, width=2)
    values = [share.value for share in shares]
    below = [share.value - share.low for share in shares]
    above = [share.high - share.value for share in shares]
    panel.barh(range(len(shares)), values, xerr=[below, above], ecolor="#777", capsize=3)
    panel.set_yticks(range(len(shares)), [f"{plain(share.name)}  {share.text}" for share in shares])
    # two dollar signs would enclose a formula
    notes = [fill(note.replace("$", r"\$"), _LINE) for note in result.notes()]
    panel.set_xlabel("\n".join([f"importance for {plain(metric)}", *notes]))
    return figure


def plot_slices(
    study: Study,
    *,
    params: Sequence[str] | None = None,
    metric: str = "value",
    objective: int = 0,
) -> Figure:
    """Plot the value by each parameter in a panel: the first trials grey, the last ones orange.

    A panel is as wide as the parameter's range.

    Args:
        study: the study.
        params: the parameters; None: all of them.
        metric: the name of the value.
        objective: index of the objective.

    Returns:
        A new figure.

    Raises:
        SweepError: no trial is complete yet, or a parameter is unknown.
        MissingExtra: Matplotlib is not installed.
    """
    trials = _complete(study)
    known = list(dict.fromkeys(name for trial in trials for name in trial.params))
    names = list(params) if params is not None else known
    if unknown := [name for name in names if name not in known]:
        raise SweepError(
            f"no trial has a parameter {', '.join(map(repr, unknown))}",
            allowed=", ".join(known),
            do="choose some of these, or omit params",
        )
    figure, panels = _panels(len(names))
    for name, panel in zip(names, panels, strict=True):
        _slice(panel, name, [trial for trial in trials if name in trial.params], objective)
    panels[0].set_ylabel(plain(metric))
    return figure


def _slice(panel: Axes, name: str, trials: Sequence[FrozenTrial], objective: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distribution = trials[-1].distributions[name]
    is_choice = isinstance(distribution, CategoricalDistribution)
    values = [trial.params[name] for trial in trials]
    if is_choice:
        values = [plain(str(value), _MAX_CHOICE) for value in values]
    elif getattr(distribution, "log", False):
        panel.set_xscale("log")
        panel.xaxis.set_minor_formatter("")  # over two decades or less its labels overlap
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
    if isinstance(distribution, (FloatDistribution, IntDistribution)) and not distribution.single():
        panel.set_xlim(distribution.low, distribution.high)  # the whole range
    panel.margins(x=0.1)
    panel.set_xlabel(plain(name))
    if is_choice and len("".join(set(values))) > _MAX_CHOICES:
        panel.tick_params(axis="x", rotation=30)
        for label in panel.get_xticklabels():
            label.set_horizontalalignment("right")


def _complete(study: Study) -> list[FrozenTrial]:
    """The trials that have a value, by number.

    Raises:
        SweepError: there are none.
    """
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if not trials:
        raise SweepError(
            f"0 trials of the study {study.study_name!r} are complete",
            allowed="at least 1 for this plot",
            do="wait for more trials, or see in .trials how they ended",
        )
    return trials


def _pruned(study: Study) -> list[tuple[int, float]]:
    """Number and last report of the pruned trials."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    reports = [(trial.number, trial.intermediate_values) for trial in trials]
    return [(number, values[max(values)]) for number, values in reports if values]


def _best_so_far(
    trials: Sequence[FrozenTrial], objective: int, direction: str
) -> list[tuple[int, float]]:
    """Number of each feasible trial, and the best value up to it."""
    choose = max if direction == "MAXIMIZE" else min
    feasible = [trial for trial in trials if _feasible(trial)]
    values = accumulate((trial.values[objective] for trial in feasible), choose)
    return [(trial.number, value) for trial, value in zip(feasible, values, strict=True)]


def _feasible(trial: FrozenTrial) -> bool:
    """Whether every constraint is at most 0. Optuna 4 stores them as one list, 5 by name."""
    excess: list[float] = []
    for key, value in trial.system_attrs.items():
        if key.partition(":")[0] == "constraints":
            excess += value if isinstance(value, list) else [value]
    return all(value <= 0 for value in excess)


def _panels(count: int, width: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels.

    pyplot makes it, so that notebooks show it, and closes it at once: otherwise a cell would show
    it twice, and the kernel would keep all figures.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra(
            f"Matplotlib cannot be imported: {error}", do="pip install matplotlib"
        ) from error
    across = min(count, _PER_ROW) or 1
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
