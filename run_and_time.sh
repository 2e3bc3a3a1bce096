#!/usr/bin/env bash
# Train, check and report, from nothing to results/<system>/bert/report.html:
#
#   ./run_and_time.sh [RECIPE] [RUNS] [-- --section.field value ...]
#
# RECIPE (default: tiny_cpu) is a recipe of bert/configuration/recipes.py, and RUNS (default: 1) is the number of runs. The
# settings of the recipe follow after "--"; ./run_and_time.sh RECIPE 1 -- --help lists them. Relative paths start at the
# repository's root. --help prints this text, and --version prints the version and the commit.
# Environment: NPROC, the number of processes on a node (default: the plan's number; one per GPU; for tiny_cpu two, or one on a
# single core). OMP_NUM_THREADS, the threads of each process (default: cores / NPROC, for tiny_cpu at most 2). If neither is set,
# a run on one node uses what `python -m cluster tune RECIPE` has found to be faster, unless TUNED=0. PYTHON, the interpreter
# that creates .venv. CLEAR_CACHES=0 keeps the page cache; otherwise it is emptied if possible, as the benchmark's rules ask.
# For several nodes, run this command on each, with torchrun's NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT and a shared
# results/. Started by a launcher (torchrun, srun with MASTER_ADDR, mpirun), this is one process of a single run. Launchers call
# ./run_and_time.sh --prepare RECIPE [-- settings] before their runs and ./run_and_time.sh --verdict RESULT_FILE... afterwards.
# Exit status: 0 if all runs are valid; 1 if a run is not valid or could not be reported; 2 for wrong input, before anything is
# started; 130 after Ctrl-C; 143 after SIGTERM.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")"
source launch/venv.sh

usage run_and_time.sh "$@"
part=all
[[ ${1-} != --prepare && ${1-} != --verdict ]] || { part=${1#--} && shift; }
recipe=tiny_cpu runs=1
results=("$@")
[[ $part == verdict || ${1--} == -* ]] || { recipe=$1 && shift; }
[[ $part != all || ${1--} == -* ]] || { runs=$1 && shift; }
[[ ${1-} != -- ]] || shift
settings=("$@")
# A launcher tells its processes their places. In the batch script of a Slurm job, SLURM_PROCID is set, but SLURM_STEP_ID is not.
if [[ $part == all && (${RANK-}${WORLD_SIZE-} || ${OMPI_COMM_WORLD_RANK-} || (${SLURM_STEP_ID-} && ${MASTER_ADDR-})) ]]; then
  part=rank
fi

if [[ $part == verdict ]]; then
  ((${#results[@]})) || fail "--verdict: no result file given, expected results/<system>/bert/result_<n>.txt"
  for result in "${results[@]}"; do
    [[ -f $result ]] || fail "--verdict: there is no file ${result@Q}, expected results/<system>/bert/result_<n>.txt"
  done
fi
whole_number RUNS "$runs" 1
whole_number NPROC "${NPROC:-1}" 1
whole_number OMP_NUM_THREADS "${OMP_NUM_THREADS:-1}" 1
whole_number CLEAR_CACHES "${CLEAR_CACHES:=1}" 0 1
whole_number TUNED "${TUNED:=1}" 0 1
nodes=1 node=0
if [[ $part == all || $part == prepare ]]; then
  nodes=${NNODES:-1} node=${NODE_RANK:-0}
  whole_number NNODES "$nodes" 1
  whole_number NODE_RANK "$node" 0
  ((node < nodes)) || fail "NODE_RANK is $node, but NNODES is $nodes: expected one below it, and neither on a single node"
  ((nodes == 1)) || whole_number MASTER_PORT "${MASTER_PORT:=29500}" 1 65535
  ((nodes == 1)) || [[ $part == prepare || (${NODE_RANK-} && ${MASTER_ADDR-}) ]] ||
    fail "NNODES is $nodes, expected NODE_RANK and MASTER_ADDR beside it"
fi

stopped=0 launched='' claim=
# Pass a signal on. Preparing programs stop as after Ctrl-C and leave no unfinished files. Training processes end the run as
# aborted with a complete log. torchrun itself does not get the signal, because it would kill them; it ends after they have
# ended. If there is no log yet, print one line; only the first node knows whether there is a log.
# shellcheck disable=SC2329  # traps call it
stop() {
  stopped=$2
  [[ $launched ]] || { [[ ${run-} && ${results[*]-} ]] || echo interrupted >&2; exit "$stopped"; }
  [[ $claim ]] || { kill -s INT -- "-$launched" 2>/dev/null || true; return 0; }
  local workers=
  ((world_size == 1)) || workers=$(grep -lsx "PPid:[[:space:]]*$launched" /proc/[0-9]*/status | cut -d/ -f3) || true
  # Killing and waiting share one redirection, because bash announces a killed job on standard error.
  if [[ ! -s $claim ]] && ((!node)) && { kill -s KILL "$launched" && { wait "$launched" || true; }; } 2>/dev/null; then
    echo interrupted >&2
    set -- TERM
  fi
  # shellcheck disable=SC2086  # one word a process
  kill -s "$1" ${workers:-"$launched"} 2>/dev/null || true
}
trap 'stop TERM 143' TERM
trap 'stop INT 130' INT
trap 'stop TERM 129' HUP

# Run a command in its own process group, which the terminal's Ctrl-C does not reach, and keep waiting for it after signals.
supervise() {
  local status
  set -m
  "$@" &
  launched=$!
  set +m
  while true; do
    wait "$launched" 2>/dev/null && status=0 || status=$?
    kill -0 "$launched" 2>/dev/null || break
  done
  launched=
  return "$((stopped ? stopped : status))"
}

# locked FILE COMMAND...: wait for the lock and become the command, because another start may run the same command now.
# shellcheck disable=SC2329  # supervise calls it
locked() {
  local lock
  exec {lock}>>"$1"
  flock "$lock"
  shift
  exec "$@"
}

extras=() gpus=$(command -v nvidia-smi || true)
[[ ! $gpus ]] || extras=(dali) # with a GPU, DALI loads the data
asked=()
[[ " ${settings[*]}" != *" --log.tensorboard"* ]] || asked=(tensorboard)
supervise bash -euo pipefail -c 'source launch/venv.sh && prepare_venv "$@"' run_and_time.sh "${extras[@]}" "${asked[@]}"
python=.venv/bin/python
train=(-m bert.train "$recipe") check=(-m cluster.dry_run "$recipe")

# Check the result files, print the table of their folder, and write its report.
verdict() {
  local folder system description checked
  folder=$(dirname "$1")
  system=$(dirname "$folder")
  description=$(dirname "$system")/systems/$(basename "$system").json
  say "check, summary and report"
  "$python" -m compliance check "$@" && checked=0 || checked=$?
  [[ -e $description ]] || "$python" -m compliance system --out "$description" \
    --division "$(sed -n 's/^# config.log.division: //p' "$1")" || checked=$((checked ? checked : 1))
  "$python" -m compliance summary "$folder" || checked=$((checked ? checked : 1))
  "$python" -m compliance report "$folder" || checked=$((checked ? checked : 1))
  return "$checked"
}
[[ $part != verdict ]] || { verdict "${results[@]}" && exit 0 || exit; }
[[ $part != rank ]] || exec "$python" "${train[@]}" "${settings[@]}"

# Read the number of processes per node from its line in the plan. The training program validates the plan.
plan=
for ((place = 0; place < ${#settings[@]}; place++)); do
  case ${settings[place]} in
    --plan) plan=${settings[place + 1]-} ;;
    --plan=*) plan=${settings[place]#*=} ;;
  esac
done
[[ ! -f $plan ]] || : "${NPROC:=$(sed -nE 's/^ *"ranks_per_node": ([1-9][0-9]{0,4}),?$/\1/p;T;q' "$plan")}"

if [[ $recipe == tiny_cpu && (" ${settings[*]} " != *" --data.train"* || " ${settings[*]} " != *" --data.evaluation"*) ]]; then
  say "data of tiny_cpu: prose of the standard library"
  mkdir -p data
  supervise locked data/tiny_cpu.lock "$python" -m dataloading demo --out data/tiny_cpu \
    --vocab bert/artifacts/tiny_cpu/vocab.txt
fi
kept=("${XDG_CACHE_HOME:-${HOME-}/.cache}"/mlperf-bert/*/runs/"$recipe"-*.json)
[[ ! ${MLPERF_BERT_CACHE-} ]] || kept=("$MLPERF_BERT_CACHE"/runs/"$recipe"-*.json)
if [[ $part == all && $nodes == 1 && $TUNED == 1 && -e ${kept[0]} ]]; then # otherwise, save the start of Python
  mapfile -t tuned < <("$python" -m cluster.tuning.choice "$recipe" "${settings[@]}")
  ((${#tuned[@]} == 0)) || say "${tuned[0]}"
  ((${#tuned[@]} < 3)) || { NPROC=${tuned[1]} && OMP_NUM_THREADS=${tuned[2]}; }
fi
source launch/processes.sh
default_processes "$recipe" "$python"
world_size=$((nodes * NPROC))
[[ $part != prepare ]] || WORLD_SIZE=${WORLD_SIZE:-$world_size} exec "$python" "${check[@]}" "${settings[@]}"

# Do not use torchrun's elastic agents (--standalone, --rdzv-backend c10d), because they unpickle the content of a store that
# listens on all addresses without a password. PET_ variables could turn them on. On one node, use any free port.
unset "${!PET_@}"
free_port='from bert.parallel.master_port import free_port; print(free_port())'

trap '' PIPE # if the reader of the output ends, such as `| tee`, the runs continue
claims=$(mktemp -d)
trap 'rm -rf "$claims"' EXIT
results=() status=0
for ((run = 1; run <= runs && !stopped; run++)); do
  ((nodes == 1 || node)) || MASTER_PORT=$MASTER_PORT "$python" -m bert.parallel.master_port || { status=$? && break; }
  # The claim tells the check that a run follows on this machine, which then needs GPUs.
  here=(WORLD_SIZE="$world_size")
  [[ " ${settings[*]} " == *" --dry-run "* ]] || here+=(LOCAL_WORLD_SIZE="$NPROC" MLPERF_BERT_CLAIM="$claims/$run")
  claim=$claims/$run
  supervise env "${here[@]}" "$python" "${check[@]}" "${settings[@]}" >"$claims/ready" || { status=$? && break; }
  ready=$(<"$claims/ready")
  [[ $ready == *"results would go to "* && " ${settings[*]} " != *" --dry-run "* ]] || { echo "$ready" && exit; } # --help
  say "$recipe, run $run of $runs: $NPROC process(es) with $OMP_NUM_THREADS thread(s) each"
  cache=()
  # needs root
  ((CLEAR_CACHES)) && [[ -w /proc/sys/vm/drop_caches ]] && sync && { echo 3 >/proc/sys/vm/drop_caches; } 2>/dev/null &&
    cache=(--log.cache-cleared)
  launcher=("$python")
  if ((world_size > 1)); then
    ((nodes > 1)) || { MASTER_ADDR=127.0.0.1 && MASTER_PORT=$("$python" -c "$free_port"); }
    launcher+=(-m torch.distributed.run --nproc-per-node "$NPROC" --nnodes "$nodes" --node-rank "$node")
    launcher+=(--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --log-dir "$claims") # or it leaves a folder in /tmp
    [[ ! $gpus ]] || launcher+=(--no-python launch/bind.sh "$python")
  fi
  supervise tied env MLPERF_BERT_CLAIM="$claim" "${launcher[@]}" "${train[@]}" "${settings[@]}" "${cache[@]}" || status=$?
  ((status <= 128 || stopped)) || await_ranks "$claim" # a signal has ended the launcher
  [[ ! -s $claim ]] || results+=("$(<"$claim")")
  claim=
  ((status > 128)) || continue
  ((stopped)) || echo "warning: signal $((status - 128)) has ended run $run: no further runs are started" >&2 || true
  break
done

if ((${#results[@]})); then # on the first node
  verdict "${results[@]}" && checked=0 || checked=$?
  status=$((checked ? checked : status))
fi
exit $((stopped ? stopped : status))
