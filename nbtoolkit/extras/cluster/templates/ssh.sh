#!/usr/bin/env bash
# {{nodes}} machines by ssh, with {{devices}} process(es) each, {{processes}} in all. Run it on a machine that reaches
# all of them without a password:
#
#   bash train.sh node1 node2 ...
#
# The folder of the project, its environment and runtime.output_dir must be the same on all machines, on
# shared storage. The first machine is the meeting point of the ranks, at port {{port}}.
set -euo pipefail
if [ "$#" -ne {{nodes}} ]; then
    echo "usage: $0 HOST ...: {{nodes}} hosts, not $#" >&2
    exit 2
fi
head=$1
folder=$PWD
# torchrun of the environment that is active here.
torchrun=$(command -v torchrun)

pids=()
# However this script ends, no machine goes on alone: ssh -tt sends the hang-up to torchrun.
trap 'kill "${pids[@]}" 2> /dev/null || true' EXIT
for host in "$@"; do
    # NCCL takes any interface but the loopback and Docker's bridge, which other machines do not reach.
    # If it takes a slow one, name the fast one, such as ib0. NCCL_DEBUG=INFO shows which it takes.
    # Each word is quoted for the remote shell. $host and $head are expanded here, once per machine.
    ssh -tt -o BatchMode=yes "$host" "$(printf '%q ' cd "$folder") && exec $(printf '%q ' \
        env NCCL_DEBUG=WARN NCCL_SOCKET_IFNAME='^lo,docker0' \
        "$torchrun" --nnodes={{nodes}} --nproc-per-node={{devices}} --max-restarts=3 \
        --rdzv-backend=c10d --rdzv-endpoint="$head:{{port}}" --rdzv-id={{name}} \
        -m {{module}})" < /dev/null &
    pids+=("$!")
done
# The first failure ends the script, and with it the other machines.
for _ in "${pids[@]}"; do
    wait -n
done
