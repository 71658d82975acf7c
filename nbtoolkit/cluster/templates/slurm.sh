#!/usr/bin/env bash
# {{nodes}} node(s) with {{devices}} device(s) each, {{processes}} in all. Submit it from the folder of the project,
# which must be on storage that all nodes share, with runtime.output_dir:
#
#   sbatch train.sh
#
#SBATCH --job-name={{name}}
#SBATCH --nodes={{nodes}}
#SBATCH --ntasks-per-node={{tasks}}
{{slurm_resources}}
#SBATCH --time={{time}}
#SBATCH --output=%x-%j.log
# A job that is requeued continues its log.
#SBATCH --open-mode=append
# Slurm sends USR1 to the ranks {{signal}} s before the time limit: they save a checkpoint and end.
#SBATCH --signal=USR1@{{signal}}
# A pre-empted job, or one whose node failed, goes back into the queue.
#SBATCH --requeue
{{slurm_options}}
set -euo pipefail
{{slurm_setup}}
{{nccl}}
{{slurm_tasks}}
{{slurm_end}}
status=0
srun {{srun}} {{command}} || status=$?
# The run ended early, at the time limit, with a checkpoint. The same job, requeued, resumes it.
if [ {{early}} ] && [ "${SLURM_RESTART_COUNT:-0}" -lt {{requeues}} ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$status"
