#!/usr/bin/env bash
# Train with torchrun on this machine, or on several without SLURM. From the root of the repository:
#
#   launchers/torchrun.sh --ranks 8 configs/orthros_130m.yaml train.steps=2000
#   launchers/torchrun.sh --ranks 8 --nodes 2 --head node1:29500 configs/orthros_1.3b.yaml     (the same on each node)
#
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save a checkpoint first. Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped.
set -euo pipefail

refuse() { echo "error: $*" >&2 && exit 2; }
is_number() {  # an option and the word behind it
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || refuse "$1 needs a number from 1, not ${2:-nothing}"
}

ranks=1 nodes=1 head=
while [ $# -gt 0 ]; do
    case "$1" in
        --ranks) is_number "$@" && ranks=$2 && shift 2 ;;
        --nodes) is_number "$@" && nodes=$2 && shift 2 ;;
        --head) [ -n "${2:-}" ] || refuse "--head needs HOST:PORT, one of the nodes"; head=$2 && shift 2 ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        *) break ;;
    esac
done
[ $# -gt 0 ] || refuse "no CONFIG.yaml (see $0 --help)"
[ "$nodes" = 1 ] || [ -n "$head" ] || refuse "--nodes $nodes needs --head HOST:PORT, one of the nodes"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "$nodes" = 1 ]; then
    meeting=(--standalone)
else
    meeting=(--nnodes="$nodes" --rdzv-backend=c10d --rdzv-endpoint="$head" --rdzv-id="$head")
fi
exec python launchers/supervise.py --launchers "$nodes" --program launchers/torchrun_rank.py "$@" -- \
    torchrun "${meeting[@]}" --nproc-per-node="$ranks" --shutdown-timeout="${STOP_SECONDS:-300}"
