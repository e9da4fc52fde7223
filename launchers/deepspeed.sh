#!/usr/bin/env bash
# Train with DeepSpeed's launcher: everything before -- goes to deepspeed, the rest is the run. From the root of the
# repository:
#
#   launchers/deepspeed.sh --num_gpus 8 -- configs/orthros_130m.yaml train.steps=2000
#   launchers/deepspeed.sh --hostfile hosts -- configs/orthros_1.3b.yaml
#
# A hostfile has a line a machine, `node1 slots=8`; DeepSpeed reaches the others over pdsh or ssh (its --launcher).
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save a checkpoint first. Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped.
set -euo pipefail

refuse() { echo "error: $*" >&2 && exit 2; }
case "${1:-}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;; esac
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1") && shift; done
[ $# -gt 1 ] || refuse "no -- CONFIG.yaml behind deepspeed's options (see $0 --help)"
shift

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python launchers/supervise.py --program "--module orthros_train" "$@" -- deepspeed "${options[@]}"
