#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [pytest arguments]. Sets up .venv first; the exit status is pytest's. With TORCH=2.11.0 in the
# environment they run with that PyTorch in place of the pinned one.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source launch/venv.sh
usage run_tests.sh "$@"

prepare_venv test dali
if [[ ${TORCH:-} ]]; then
  prepare_torch "$TORCH"
  export PYTHONPATH=$PWD/.venv/torch-$TORCH${PYTHONPATH:+:$PYTHONPATH}
fi
workers=$(env -u OMP_NUM_THREADS nproc)
workers=$((workers < 8 ? workers : 8))
say "pytest with $workers worker(s)"
export OMP_NUM_THREADS=1 # the tests are the parallel part
exec .venv/bin/python -m pytest --numprocesses "$workers" --dist loadfile "$@"
