"""What a person does in one session, for a preloaded flock: python nfs_session.py FOLDER."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import nbtoolkit as nb
from nbtoolkit.tasks.digits import train


def main(outputs: Path) -> None:
    folder = os.open(outputs, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError as error:
        print("folders:", error.strerror)
    os.close(folder)
    settings = {"runtime.output_dir": str(outputs), "train.epochs": 1}
    config = nb.load_config(overrides=settings)
    running = nb.launch(train, config, processes=1, wait=False, display="off")
    while not running.paths.events.exists():
        pass
    print("owned:", running.paths.owned(), nb.attach(running.paths.folder).paths.owned())
    result = running.result()
    print("owned:", result.paths.owned())
    print("tracked:", result.paths.tracking.is_file())
    more, run = {**settings, "train.epochs": 2}, result.paths.folder.name
    again = nb.launch(train, more, processes=1, resume=run)
    print("resumed:", again.paths == result.paths, again.status)
    space = {"optim.lr": {"type": "float", "low": 1e-3, "high": 0.1, "log": True}}
    study = nb.sweep(train, config, space, n_trials=2, display="off")
    print("trials:", list(study.trials["state"]))
    bundles = outputs.parent / "bundles"
    bundles.mkdir()
    (bundles / ".nbtoolkit-relay.bundle.leftover").touch()  # by a process that was killed
    nb.pack(bundles, source=outputs)
    print("unpacked:", len(nb.unpack(bundles, into=outputs.parent / "next").new))
    print("left:", sorted(path.name for path in bundles.iterdir()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
