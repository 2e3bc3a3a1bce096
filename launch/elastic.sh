#!/usr/bin/env bash
# Train on hosts that may be lost and come back. First start the meeting point of the hosts (the rendezvous) on a machine
# that stays up, such as a login node:
#
#   launch/elastic.sh --meet PORT
#
# Then run this on each host, including hosts that join later or come back:
#
#   launch/elastic.sh MIN:MAX HOST:PORT RECIPE -- --checkpoint.folder DIR [--section.field value ...]
#
# MIN and MAX are the minimum and maximum numbers of hosts. DIR is a folder that all hosts can access. It identifies the run:
# hosts that are started with the same DIR join or continue the run.
# Environment: NPROC, the number of processes on each host (default: one per GPU, or one without GPUs); OMP_NUM_THREADS, the
# number of threads of each process; ADDRESS, the address at which other hosts reach this host (default: its name); LAST_CALL,
# the seconds to wait for more hosts once there are MIN (default: 30).
# Relative paths start at the root of the repository. Security: anybody who can reach PORT, or read the agents' traffic, can
# make torchrun's agents run code. See docs/launching.md. Exit status: 0 at the end of the run, 2 for wrong input, 3 after a
# fault that restarts cannot mend, 128 + n after signal n. torchrun's own reports go to the folder of the run's results.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
source launch/venv.sh
usage launch/elastic.sh "$@"
extras=()
! command -v nvidia-smi >/dev/null || extras=(dali) # on a GPU, DALI can load the data
prepare_venv "${extras[@]}"
exec .venv/bin/python -m bert.launch.elastic "$@"
