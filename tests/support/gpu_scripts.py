"""Scripts on a machine with a GPU, which print their answers as JSON."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from kernels import script

SECONDS = 240.0  # CUDA's first start from a cold disk takes a minute

METRIC_LEARNING = Path(__file__).parents[2] / "config/metric_learning.yaml"

START = f"""
import json, torch
METRIC_LEARNING = {str(METRIC_LEARNING)!r}
settings = {{"tracking.mlflow": False, "runtime.output_dir": "."}}

def launch(train, **options):
    return nb.launch(train, {{**settings, **options.pop("config", {{}})}}, display="off", **options)

def tell(**answers):
    print(json.dumps(answers))
"""

IMAGES = """
# Images with a rule in them, and a model whose training draws random numbers on the device.
from torch import nn
from torch.utils.data import TensorDataset

drawn = torch.Generator().manual_seed(0)
images = torch.randn(640, 1, 8, 8, generator=drawn)
labels = (images[:, 0, :4].sum((1, 2)) > images[:, 0, 4:].sum((1, 2))).long()
data = TensorDataset(images, labels)
small = {"train.epochs": 4, "train.batch_size": 64, "optim.lr": 0.01}

def make(dropout=0.0):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Dropout(dropout), nn.Flatten(), nn.Linear(576, 2)]
    return nn.Sequential(*layers)

def train(config, ctx):
    torch.backends.cudnn.deterministic = config.model.get("exact", False)
    model, loss = make(config.model.get("dropout", 0.0)), nn.functional.cross_entropy
    return nb.fit(ctx, config, model, data, data, loss=loss, metrics="accuracy")
"""


def told(code: str, cwd: Path, cards: str = "0") -> dict[str, Any]:
    """Run the code in a kernel that sees these cards; return its answers."""
    with script(START + textwrap.dedent(code), cwd, CUDA_VISIBLE_DEVICES=cards) as kernel:
        out, err = kernel.end(SECONDS)
        assert kernel.process.returncode == 0, err + ends_of_logs(cwd)
        answers: dict[str, Any] = json.loads(out.splitlines()[-1])
        return answers


def ends_of_logs(cwd: Path) -> str:
    """The last lines of every rank of the runs in a folder."""
    logs = sorted(cwd.glob("*/ranks/*/log.txt"))
    return "".join(f"\n--- {log}\n{log.read_text()[-3000:]}" for log in logs)


def told_by_two_nodes(code: str, cwd: Path, cards: str = "0") -> dict[str, Any]:
    """Run the code on two ranks, each a node of its own to torchrun; return rank 0's answers.

    Both have the same card. NCCL refuses two ranks on one card of a machine; NCCL_HOSTID makes each
    of them a machine to NCCL, and they communicate through sockets.
    """
    (cwd / "script.py").write_text("import nbtoolkit as nb\n" + START + textwrap.dedent(code))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                *fixed,
                f"--node-rank={node}",
                "script.py",
            ],
            cwd=cwd,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": cards,
                "NCCL_HOSTID": f"node-{node}",
                "NCCL_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(cwd),  # torchrun leaves its log folder behind
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=SECONDS)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs) + ends_of_logs(cwd)
    lines = [line for line in outputs[0].splitlines() if line.startswith("{")]
    answers: dict[str, Any] = json.loads(lines[-1])
    return answers
