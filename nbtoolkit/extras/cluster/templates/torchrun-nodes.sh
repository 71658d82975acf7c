#!/usr/bin/env bash
# {{nodes}} machines with {{devices}} process(es) each, {{processes}} in all. Run it on every machine, with the same
# HEAD: the name or address of one of them, which all of them reach at port {{port}}.
#
#   HEAD=node1 bash train.sh
#
# The folder of the project and runtime.output_dir must be the same on all machines, on shared storage: rank 0
# writes the run, and every rank reads its result.
set -euo pipefail
: "${HEAD:?set HEAD to the name or address of one machine, the same on all of them}"
# Warnings of NCCL; INFO shows which network each rank takes.
export NCCL_DEBUG=WARN
# NCCL takes any interface but the loopback and Docker's bridge, which other machines do not reach.
# If it takes a slow one, name the fast one, such as ib0.
export NCCL_SOCKET_IFNAME='^lo,docker0'
# The c10d rendezvous numbers the machines itself: no --node-rank is needed, and one that comes
# back gets a rank again. --rdzv-id keeps two trainings on the same machines apart.
# --nnodes=MIN:MAX would go on with fewer machines after a loss; the batch of a step stays the same.
exec torchrun --nnodes={{nodes}} --nproc-per-node={{devices}} --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:{{port}}" --rdzv-id={{name}} \
    -m {{module}}
