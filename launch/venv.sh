# shellcheck shell=bash
# Functions that create .venv, sourced by the other scripts. .venv contains pinned packages, including pip. It is created once
# and reused. This needs CPython >= 3.11 with pip, but neither python3-venv nor ensurepip. The environment variable PYTHON
# selects the interpreter (default: python3). With SYSTEM_TORCH=1, .venv uses the interpreter's own PyTorch and Triton at their
# installed versions, with the NumPy and setuptools that this PyTorch needs, for containers that ship their own build.

# shellcheck source=launch/environment.sh
source "${BASH_SOURCE[0]%/*}/environment.sh"

# pip installs packages without bytecode, so the first start of a program compiles them. It must be able to save the
# bytecode: without it, every start of PyTorch takes three times as long.
unset PYTHONDONTWRITEBYTECODE

# prepare_venv [EXTRA...]: install the dependencies in pyproject.toml, including the extra "train" and the given extras, at
# the versions in constraints.txt and with the digests in hashes.txt, unless they are installed already. Call it in the root of
# the repository.
prepare_venv() {
  venv_is_current "$@" && return
  local lock
  # Lock constraints.txt, because it exists before .venv and stays in place while .venv is recreated.
  { exec {lock}>>constraints.txt; } 2>/dev/null || fail "cannot write to $PWD, where .venv is to be made"
  flock "$lock" # another process may be installing now
  local missing
  missing=$(venv_missing)
  [[ ! $missing ]] || { say "$missing is gone from .venv: installing it again" && rm -rf .venv; }
  venv_is_current "$@" || run_apart install_venv "$@"
  exec {lock}>&-
}

# prepare_torch VERSION: install that version of PyTorch and its dependencies into .venv/torch-VERSION, unless it is installed
# already. If this folder is in PYTHONPATH, its PyTorch replaces the pinned version. Call it in the root of the repository,
# where .venv must exist. Its NumPy is older than 2.4, because Triton 3.6 (for PyTorch 2.11) cannot interpret kernels with 2.4.
prepare_torch() {
  local folder=.venv/torch-$1
  [[ $1 =~ ^[0-9]+([.+][0-9a-z]+)*$ ]] || fail "TORCH is ${1@Q}, expected a version such as 2.11.0" # it is part of a path
  [[ -e $folder/installed ]] || run_apart install_torch "$1" "$folder"
}

install_torch() {
  local python folder=$2
  python=$(venv_maker)
  say "installing PyTorch $1 into $folder (once, a minute or two)"
  rm -rf "$folder" && mkdir -p "$folder"
  grep -vE '^(torch|setuptools|numpy)==' constraints.txt >"$folder/constraints.txt"
  "$python" -m pip --python .venv/bin/python install -qq --disable-pip-version-check --no-input --no-compile \
    --only-binary=:all: --constraint "$folder/constraints.txt" --target "$folder" "torch==$1" "numpy<2.4" ||
    fail "pip could not install PyTorch $1, see above"
  touch "$folder/installed"
}

# run_apart COMMAND...: run a command in its own process group, and exit if it fails. Ctrl-C in the terminal then does not
# reach pip, which would print a traceback. The next start repeats an unfinished installation.
run_apart() {
  trap 'stop_apart 130' INT
  trap 'stop_apart 143' TERM
  trap 'stop_apart 129' HUP
  set -m
  "$@" &
  set +m
  wait "$!" || exit
  trap - INT TERM HUP
}

# shellcheck disable=SC2329  # traps call it
stop_apart() {
  kill -s KILL -- "-${!-}" 2>/dev/null || true
  echo "interrupted: the next start installs the packages again" >&2
  exit "$1"
}

venv_is_current() {
  local part pins
  pins=$(venv_pins) || return 1
  for part in run "$@"; do
    [[ -r .venv/installed/$part && $(<".venv/installed/$part") == "$pins" ]] || return 1
  done
  [[ ! $(venv_missing) ]]
}

# Print the first installed file or folder that is missing from .venv's packages. pip would not notice, because it trusts its
# own records.
venv_missing() {
  [[ ! -r .venv/installed/entries ]] || LC_ALL=C comm -23 .venv/installed/entries <(venv_entries) | sed -n 1p
}

venv_entries() {
  (shopt -s nullglob dotglob && cd .venv/lib && printf '%s\n' python*/site-packages/*) 2>/dev/null | LC_ALL=C sort
}

# Print the lines of hashes.txt for the given extras, with SYSTEM_TORCH without NumPy and setuptools, which are not replaced.
venv_hashes() {
  grep -E "# (.* )?($(IFS="|" && echo "$*"))( |\$)" hashes.txt | grep -vE "^(${SYSTEM_TORCH:+numpy|setuptools})=="
}

# On a machine without an NVIDIA GPU, warn that pip will install PyTorch's large CUDA build, if pip's index has no CPU build.
warn_of_cuda() {
  local torch
  torch=$(sed -n 's/^torch==//p' constraints.txt)
  if [[ ${SYSTEM_TORCH-} || $(uname -s) != Linux ]] || command -v nvidia-smi >/dev/null ||
    compgen -G ".venv/lib/python*/site-packages/torch" >/dev/null ||
    [[ $("$1" -m pip index versions torch 2>/dev/null) == *" $torch+cpu"* ]]; then return; fi
  say "no NVIDIA GPU here, and pip's index has PyTorch for CUDA only: 2.7 GB to download, 5 GB on disk." \
    "For the CPU build of 0.2 GB press Ctrl-C and set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
}

venv_pins() { { .venv/bin/python -V && sha256sum constraints.txt hashes.txt pyproject.toml; } 2>/dev/null; }

# Print the interpreter that creates .venv. If .venv is activated, its own interpreter is first in PATH. Use its base
# interpreter instead, because the installation may delete .venv.
venv_maker() {
  local python=${PYTHON:-python3}
  [[ $(command -v -- "$python") != "$PWD"/.venv/* ]] || python=$("$python" -c 'import sys; print(sys._base_executable)')
  printf '%s\n' "$python"
}

install_venv() {
  local python part requirements
  python=$(venv_maker)
  command -v -- "$python" >/dev/null || fail "there is no $python: install CPython 3.11 or newer, or set PYTHON to its path"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' &>/dev/null ||
    fail "$python is $("$python" -V 2>&1), expected 3.11 or newer: set PYTHON to the path of a newer one"
  "$python" -m pip --python "$(command -v -- "$python")" --version &>/dev/null ||
    fail "$python has no pip of version 22.3 or newer: install it (Debian and Ubuntu: apt install python3-pip)"
  if [[ -e .venv/incomplete ]] || ! .venv/bin/python -V &>/dev/null; then
    say "making .venv with $("$python" -V)"
    rm -rf .venv && mkdir .venv && touch .venv/incomplete
    "$python" -m venv --without-pip ${SYSTEM_TORCH:+--system-site-packages} .venv ||
      fail "could not make .venv in $PWD, see above"
  fi
  touch .venv/incomplete # pip would treat a partially installed package as complete
  warn_of_cuda "$python"
  say "installing pinned packages into .venv (once, a minute or two)"
  requirements=$("$python" -c '
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("pip", *project["dependencies"], *(name for extra in sys.argv[1:] for name in project["optional-dependencies"][extra]))
' train "$@")
  "$python" -c '
import importlib.metadata, os
kept = ("numpy", "setuptools", "torch", "triton") if os.environ.get("SYSTEM_TORCH") else ()
for line in open("constraints.txt"):
    name = line.partition("==")[0]
    try:
        print(f"{name}=={importlib.metadata.version(name)}" if name in kept else line.rstrip())
    except importlib.metadata.PackageNotFoundError:
        print(line.rstrip())
' >.venv/constraints.txt
  # The first call checks the digest of each wheel. The second call installs PyTorch and the packages that its CUDA build
  # needs. They have no recorded digests, because every package index has its own builds.
  venv_hashes run "$@" >.venv/hashes.txt
  "$python" -m pip --python .venv/bin/python install -qq --disable-pip-version-check --no-input --no-compile \
    --only-binary=:all: --require-hashes --no-deps --requirement .venv/hashes.txt ||
    fail "pip could not install the packages, see above"
  # shellcheck disable=SC2086  # each word is a requirement
  "$python" -m pip --python .venv/bin/python install -qq --disable-pip-version-check --no-input --no-compile \
    --only-binary=:all: --constraint .venv/constraints.txt $requirements ||
    fail "pip could not install the packages, see above${SYSTEM_TORCH:+; PyTorch stays $(grep ^torch== .venv/constraints.txt)}"
  mkdir -p .venv/installed
  for part in run "$@"; do
    venv_pins >".venv/installed/$part"
  done
  venv_entries >.venv/installed/entries
  rm .venv/incomplete
}
