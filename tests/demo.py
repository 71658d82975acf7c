"""Run the first notebook as papermill does, and print its result and where it is (make demo)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import papermill
from traitlets.config import Config

from nbtoolkit.environment.hardware import detect_hardware
from nbtoolkit.launcher.run_result import RunResult
from nbtoolkit.run.paths import RunPaths

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks/01_train.ipynb"
ENOUGH = 0.97

# Talk to the kernel over a file, not a TCP port that others on this machine can reach.
IPC = Config({"KernelManager": {"transport": "ipc"}, "AsyncKernelManager": {"transport": "ipc"}})


def main() -> int:
    """Execute the notebook into outputs/demo; 1 when its val_accuracy is not good enough."""
    folder = ROOT / "outputs/demo"
    folder.mkdir(parents=True, exist_ok=True)
    processes = 0 if detect_hardware().usable else 2  # all GPUs, or two processes on the CPU
    executed, began = folder / NOTEBOOK.name, time.monotonic()
    print(f"executing {NOTEBOOK.relative_to(ROOT)} ...", flush=True)
    papermill.execute_notebook(
        NOTEBOOK,
        executed,
        parameters={"processes": processes, "output_dir": str(folder)},
        cwd=NOTEBOOK.parent,
        progress_bar=False,
        config=IPC,
    )
    newest = max(folder.glob("*-digits-*"))
    accuracy = RunResult(RunPaths(newest)).metrics["val_accuracy"]
    print(f"val_accuracy:      {accuracy:.4f} (after {time.monotonic() - began:.0f} s)")
    print(f"executed notebook: {executed}")
    print(f"the run:           {newest}")
    print(f"MLflow database:   {folder / 'mlflow.db'}")
    return 0 if accuracy >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
