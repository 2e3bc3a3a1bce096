#!/usr/bin/env bash
# Train, check and report, from nothing to results/<system>/bert/report.html:
#
#   ./run_and_time.sh [RECIPE] [RUNS] [-- --section.field value ...]
#
# RECIPE (default: tiny_cpu) is a recipe of bert/configuration/recipes.py, RUNS (default: 1) the number of runs, and what
# follows are settings of the recipe; ./run_and_time.sh RECIPE 1 -- --help lists them. Relative paths start at the
# repository's root.
# --help prints this, --version a line with version and commit.
# Environment: NPROC, the number of processes (default: that of --plan; one a GPU; for tiny_cpu two, or one on a single core);
# OMP_NUM_THREADS, the threads of each (default: cores / NPROC, for tiny_cpu at most 2); with none of these, on one node,
# what `python -m cluster tune RECIPE` has found to be faster, unless TUNED=0; PYTHON, what .venv is made with;
# CLEAR_CACHES=0 keeps the page cache, which a run otherwise empties where it may, as the benchmark's rules ask.
# Several nodes, one of these commands on each: NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT as of torchrun; they share results/.
# Started by a launcher (torchrun, srun with MASTER_ADDR, mpirun), this is one process of its run, and RUNS is 1. Launchers call
# ./run_and_time.sh --prepare RECIPE [-- settings] before and ./run_and_time.sh --verdict RESULT_FILE... after their runs.
# Exit status: 0 all runs are valid; 1 one is not, or could not be reported; 2 wrong input, nothing was started; 130, 143 after
# Ctrl-C, SIGTERM.
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
# A launcher's process has its place from there. In the batch script of a Slurm job, SLURM_PROCID is set, but no step.
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
# Pass a signal on. What prepares gives up as at Ctrl-C and leaves nothing half made. The processes that train end the run as
# aborted with its log complete; torchrun itself does not get the signal, because it would cut them off, and ends when they
# have ended. Before there is a log, one line says so; only the first node learns that there is one.
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

# Run a command in a process group of its own, out of reach of the terminal's Ctrl-C, and wait for it through signals.
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

# locked FILE COMMAND...: become the command when nobody else holds the lock; another start may be doing the same.
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

# Check the result files, and show and write the table and the report of their folder.
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

# A plan says how many processes a node has, on a line of its own; whether it is one, the program looks for itself.
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
if [[ $part == all && $nodes == 1 && $TUNED == 1 && -e ${kept[0]} ]]; then # else Python need not start for it
  mapfile -t tuned < <("$python" -m cluster.tuning.choice "$recipe" "${settings[@]}")
  ((${#tuned[@]} == 0)) || say "${tuned[0]}"
  ((${#tuned[@]} < 3)) || { NPROC=${tuned[1]} && OMP_NUM_THREADS=${tuned[2]}; }
fi
source launch/processes.sh
default_processes "$recipe" "$python"
world_size=$((nodes * NPROC))
[[ $part != prepare ]] || WORLD_SIZE=${WORLD_SIZE:-$world_size} exec "$python" "${check[@]}" "${settings[@]}"

# Not torchrun's elastic agents (--standalone, --rdzv-backend c10d): those unpickle what stands in a store without a password,
# which listens on all addresses. Variables could ask for them, too. One node: any port that is free, below those of connections.
unset "${!PET_@}"
free_port='from bert.parallel.master_port import free_port; print(free_port())'

trap '' PIPE # the reader of the output may end, as `| tee` does: runs go on without it
claims=$(mktemp -d)
trap 'rm -rf "$claims"' EXIT
results=() status=0
for ((run = 1; run <= runs && !stopped; run++)); do
  ((nodes == 1 || node)) || MASTER_PORT=$MASTER_PORT "$python" -m bert.parallel.master_port || { status=$? && break; }
  # That a run is to follow here, the check learns from the claim: without one, a machine need have no GPUs.
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
