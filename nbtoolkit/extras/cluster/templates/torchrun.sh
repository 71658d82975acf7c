#!/usr/bin/env bash
# One machine: torchrun starts {{processes}} process(es), and starts them again after a failure. The run
# then resumes from its last checkpoint.
#
#   bash train.sh
set -euo pipefail
# Warnings of NCCL; INFO shows which network each rank takes.
export NCCL_DEBUG=WARN
# --standalone: a free port on this machine for the meeting of the ranks.
# --max-restarts: how often all ranks start again after one has failed or died.
exec torchrun --standalone --nproc-per-node={{devices}} --max-restarts=3 \
    -m {{module}}
