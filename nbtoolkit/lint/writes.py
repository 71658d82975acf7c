"""Writes: in a function that every rank runs, without a word on which of them writes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from nbtoolkit.lint.hazard import Hazard, hazard
from nbtoolkit.lint.main_rank import mentions_rank
from nbtoolkit.lint.program import Program

# Full names, and of some modules whatever begins so.
_FUNCTIONS = {
    "torch.save",
    "numpy.save",
    "numpy.savez",
    "numpy.savez_compressed",
    "numpy.savetxt",
    "pickle.dump",
    "json.dump",
    "yaml.dump",
    "joblib.dump",
    "shutil.copy",
    "shutil.copyfile",
    "shutil.copytree",
    "shutil.move",
    "shutil.rmtree",
    "os.remove",
    "torch.utils.tensorboard.SummaryWriter",
    "tensorboardX.SummaryWriter",
}
_TRACKING = ("mlflow.log_", "mlflow.set_", "mlflow.start_run", "wandb.init", "wandb.log")

_METHODS = {
    "to_csv",
    "to_parquet",
    "to_pickle",
    "to_json",
    "to_feather",
    "to_excel",
    "write_text",
    "write_bytes",
    "savefig",
    "save_pretrained",
    "push_to_hub",
    "unlink",
}
# pandas gives back a text where no place is named.
_NEED_A_PLACE = {"to_csv", "to_json"}


def unguarded_writes(program: Program) -> Iterator[Hazard]:
    """Writes that every rank makes, to the same place."""
    for site in program.in_ranks():
        call = site.node
        if site.guarded or not isinstance(call, ast.Call) or mentions_rank(call):
            continue
        if name := _write(call, program.names.full(call.func)):
            what = f"{name} is called by every rank"
            yield hazard("unguarded-write", what, cell=site.cell.number, line=call.lineno)


def _write(call: ast.Call, full: str) -> str:
    """The name of what a call writes with; empty where it does not write."""
    method = full.rpartition(".")[2]
    if full in _FUNCTIONS or full.startswith(_TRACKING):
        return full
    if method == "open" and _writes(call, first=1 if full in ("open", "io.open") else 0):
        return "open(..., 'w')"
    if method in _METHODS and "." in full:
        return "" if method in _NEED_A_PLACE and not call.args + call.keywords else f".{method}"
    return ""


def _writes(call: ast.Call, first: int) -> bool:
    """Whether ``open`` is asked to write; ``first`` is the mode's place among the arguments."""
    named = [word.value for word in call.keywords if word.arg == "mode"]
    modes = named or call.args[first : first + 1]
    return any(
        isinstance(mode, ast.Constant)
        and isinstance(mode.value, str)
        and bool(set(mode.value) & set("wax+"))
        and set(mode.value) <= set("rwaxbt+U")
        for mode in modes
    )
