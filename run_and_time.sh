#!/usr/bin/env bash
# Train, check and report, from nothing to results/<system>/bert/report.html:
#
#   ./run_and_time.sh [RECIPE] [RUNS] [-- --section.field value ...]
#
# RECIPE (default: tiny_cpu) is a recipe of bert/configuration/recipes.py, and RUNS (default: 1) is the number of runs. The
# settings of the recipe follow after "--"; ./run_and_time.sh RECIPE 1 -- --help lists them. Relative paths start at the
# repository's root. --help prints this text, and --version prints the version and the commit.
# Environment: NPROC, the number of processes on a node (default: the plan's number, otherwise one per GPU; on a CPU one, or
# two for a small model if there are two cores). OMP_NUM_THREADS, the threads of each process (default: cores / NPROC, at most 2
# for a small model on a CPU). PYTHON, the interpreter that creates .venv. CLEAR_CACHES=0 keeps the page cache; otherwise it is
# emptied if possible, as the benchmark's rules ask. BIND=off does not bind processes to the cores nearest to their GPUs.
# For several nodes, run this command on each, with torchrun's NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT and a shared
# results/. Started by a launcher (torchrun, srun with MASTER_ADDR, mpirun), this is one process of a single run. Launchers call
# ./run_and_time.sh --prepare RECIPE [-- settings] before their runs and ./run_and_time.sh --verdict RESULT_FILE... afterwards.
# Exit status: 0 if all runs are valid; 1 if a run is not valid or could not be reported; 2 for wrong input; 3 after a fault of
# a process; 10 if --prepare got settings such as --help, which start no run; 130 after Ctrl-C; 143 after SIGTERM.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source launch/venv.sh
usage run_and_time.sh "$@"
# shellcheck disable=SC2329  # traps call it
stop() { echo interrupted >&2 && exit "$1"; }
trap 'stop 130' INT
trap 'stop 143' TERM
trap 'stop 129' HUP
[[ ! -e /proc/$$ || -e /proc/$$/fd/1 ]] || exec >/dev/null # torchrun fails if stdout is closed

extras=()
! command -v nvidia-smi >/dev/null || extras=(dali) # on a GPU, DALI can load the data
prepare_venv "${extras[@]}"
# Block signals until Python handles them. Older versions of env lack these options.
hold=(env --block-signal=INT --block-signal=TERM --block-signal=HUP)
"${hold[@]}" true 2>/dev/null || hold=()
exec "${hold[@]}" .venv/bin/python -m bert.launch "$@"
