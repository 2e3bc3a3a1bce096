# shellcheck shell=bash
# Sourced by run_and_time.sh, and asked by `python -m cluster tune`: how many processes a node gets where nobody says.

# default_processes RECIPE PYTHON: set NPROC and OMP_NUM_THREADS unless they are set.
default_processes() {
  local recipe=$1 python=$2 cores threads
  cores=$(env -u OMP_NUM_THREADS nproc)
  if [[ $recipe == tiny_cpu ]]; then
    : "${NPROC:=$((cores > 1 ? 2 : 1))}"
  elif ! command -v nvidia-smi >/dev/null; then # no GPU
    : "${NPROC:=1}"
  else
    : "${NPROC:=$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}"
  fi
  threads=$((cores > NPROC ? cores / NPROC : 1))
  [[ $recipe != tiny_cpu ]] || threads=$((threads < 2 ? threads : 2)) # so small a model gains nothing from more
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
}
