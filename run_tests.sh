#!/usr/bin/env bash
# Run the tests: ./run_tests.sh [--quick] [pytest arguments]. Sets up .venv first. The exit status is pytest's. --quick runs only
# the tests that are not marked slow, which are the unit tests of all packages, with fewer examples. With TORCH=2.11.0 in the
# environment, the tests use that version of PyTorch instead of the pinned one.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source launch/venv.sh
usage run_tests.sh "$@"
selection=()
[[ ${1-} != --quick ]] || { selection=(-m "not slow" --hypothesis-profile quick --loadscope-reorder) && shift; }

prepare_venv test dali
if [[ ${TORCH:-} ]]; then
  prepare_torch "$TORCH"
  export PYTHONPATH=$PWD/.venv/torch-$TORCH${PYTHONPATH:+:$PYTHONPATH}
fi
cores=$(env -u OMP_NUM_THREADS nproc)
workers=$((cores < 8 ? cores : 8))
[[ ${selection[*]} || $cores -ge 8 ]] || workers=$((cores + 2)) # use more workers than cores, because slow tests often wait
say "pytest with $workers workers"
# Let glibc keep the memory of freed tensors. Otherwise the system clears memory for each new tensor.
[[ ! ${selection[*]} ]] || export MALLOC_TRIM_THRESHOLD_=2000000000 MALLOC_MMAP_THRESHOLD_=1000000000
export OMP_NUM_THREADS=1 # one thread per test, because tests run in parallel
# Skip the plugins of packages that the tests do not use, which saves each worker half a second.
exec .venv/bin/python -m pytest -p no:anyio -p no:typeguard --numprocesses "$workers" --max-worker-restart 0 \
  --dist loadfile --no-loadscope-reorder "${selection[@]}" "$@"
