#!/usr/bin/env bash
# {{nodes}} node(s) with {{devices}} device(s) each, {{processes}} in all. Submit it from the folder of the project,
# which must be on storage that all nodes share, with runtime.output_dir:
#
#   sbatch train.sh
#
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{tasks}}
# Minutes.
#SBATCH --time={{minutes}}
#SBATCH --output=%x-%j.log
# A job that is requeued continues its log.
#SBATCH --open-mode=append
# Slurm sends USR1 to the ranks {{signal}} s before the time limit: they save a checkpoint and end.
#SBATCH --signal=USR1@{{signal}}
# A pre-empted job, or one whose node failed, goes back into the queue.
#SBATCH --requeue
# Resources, partition, account and further options: the section `cluster` of the settings.
{{options}}
set -euo pipefail
# Your environment: cluster.modules and cluster.setup.
{{setup}}
# Warnings of NCCL; INFO shows which network each rank takes.
export NCCL_DEBUG=WARN
# Between nodes, NCCL takes any interface but the loopback and Docker's bridge, which other machines
# do not reach. If it takes a slow one, name the fast one, such as ib0.
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    export NCCL_SOCKET_IFNAME='^lo,docker0'
fi
# srun starts the tasks on every node, and sets each task's rank: nbtoolkit reads it. The address of
# the first node comes from Slurm's list of nodes, which is compressed (n[1-4]) and needs no parsing
# here. When one rank has failed, srun ends the others, which would wait for it.
status=0
srun {{command}} || status=$?
# The run ended early, at the time limit, with a checkpoint. The same job, requeued, resumes it.
if [ {{ended_early}} ] && [ "${SLURM_RESTART_COUNT:-0}" -lt {{requeues}} ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
