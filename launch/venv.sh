# shellcheck shell=bash
# Sourced by the commands: .venv holds pinned packages, is made once and reused. Needs CPython >= 3.11 with pip, and
# neither python3-venv nor ensurepip. The environment variable PYTHON names another interpreter than python3. With
# SYSTEM_TORCH=1, its PyTorch and Triton stay in use, at their versions (for containers that bring a build of their own).

# shellcheck source=launch/environment.sh
source "${BASH_SOURCE[0]%/*}/environment.sh"

# pip leaves it to the first start to compile a package. A start of PyTorch that must compile it takes three times as long.
unset PYTHONDONTWRITEBYTECODE

# prepare_venv [EXTRA...]: install the dependencies of pyproject.toml, of training and of these extras, at the versions of
# constraints.txt, unless they are there. Runs in the root of the repository.
prepare_venv() {
  venv_is_current "$@" && return
  local lock
  # A file that is there before .venv is, and stays while that is made anew.
  { exec {lock}>>constraints.txt; } 2>/dev/null || fail "cannot write to $PWD, where .venv is to be made"
  flock "$lock" # another start may be installing at this moment
  local missing
  missing=$(venv_missing)
  [[ ! $missing ]] || { say "$missing is gone from .venv: making it anew" && rm -rf .venv; }
  venv_is_current "$@" || install_venv "$@"
  exec {lock}>&-
}

# prepare_torch VERSION: put that PyTorch with what it needs into .venv/torch-VERSION, unless it is there. Before .venv's packages
# in PYTHONPATH it takes the place of the pinned one. Where .venv is, in the root of the repository. The interpreter of Triton
# 3.6, which PyTorch 2.11 brings, fails with NumPy 2.4.
prepare_torch() {
  local python folder=.venv/torch-$1
  [[ $1 =~ ^[0-9]+([.+][0-9a-z]+)*$ ]] || fail "TORCH is ${1@Q}, expected a version such as 2.11.0" # it is part of a path
  [[ -e $folder/installed ]] && return
  python=$(venv_maker)
  say "installing PyTorch $1 into $folder (once, a minute or two)"
  rm -rf "$folder" && mkdir -p "$folder"
  grep -vE '^(torch|setuptools|numpy)==' constraints.txt >"$folder/constraints.txt"
  "$python" -m pip --python .venv/bin/python install -qq --disable-pip-version-check --no-input --no-compile \
    --only-binary=:all: --constraint "$folder/constraints.txt" --target "$folder" "torch==$1" "numpy<2.4" ||
    fail "pip could not install PyTorch $1, see above"
  touch "$folder/installed"
}

venv_is_current() {
  local part pins
  pins=$(venv_pins) || return 1
  for part in run "$@"; do
    [[ -r .venv/installed/$part && $(<".venv/installed/$part") == "$pins" ]] || return 1
  done
  [[ ! $(venv_missing) ]]
}

# The first of what installing put into .venv's packages that is not there any more. pip would believe its own notes.
venv_missing() {
  [[ ! -r .venv/installed/entries ]] || LC_ALL=C comm -23 .venv/installed/entries <(venv_entries) | sed -n 1p
}

venv_entries() {
  (shopt -s nullglob dotglob && cd .venv/lib && printf '%s\n' python*/site-packages/*) 2>/dev/null | LC_ALL=C sort
}

venv_pins() { { .venv/bin/python -V && sha256sum constraints.txt pyproject.toml; } 2>/dev/null; }

# The interpreter that makes .venv. Where that is activated its own comes first, which has no pip and would clear itself.
venv_maker() {
  local python=${PYTHON:-python3}
  [[ $(command -v "$python") != "$PWD"/.venv/* ]] || python=$("$python" -c 'import sys; print(sys._base_executable)')
  printf '%s\n' "$python"
}

install_venv() {
  local python part requirements
  python=$(venv_maker)
  command -v "$python" >/dev/null || fail "there is no $python: install CPython 3.11 or newer, or set PYTHON to its path"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' &>/dev/null ||
    fail "$python is $("$python" -V 2>&1), expected 3.11 or newer: set PYTHON to the path of a newer one"
  "$python" -m pip --python "$(command -v "$python")" --version &>/dev/null ||
    fail "$python has no pip of version 22.3 or newer: install it (Debian and Ubuntu: apt install python3-pip)"
  if [[ -e .venv/incomplete ]] || ! .venv/bin/python -V &>/dev/null; then
    say "making .venv with $("$python" -V)"
    "$python" -m venv --without-pip --clear ${SYSTEM_TORCH:+--system-site-packages} .venv ||
      fail "could not make .venv in $PWD, see above"
  fi
  touch .venv/incomplete # pip takes a package that was cut off while it was installed for whole
  say "installing pinned packages into .venv (once, a minute or two)"
  requirements=$("$python" -c '
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *(name for extra in sys.argv[1:] for name in project["optional-dependencies"][extra]))
' train "$@")
  "$python" -c '
import importlib.metadata, os, sys
kept = ("torch", "triton") if os.environ.get("SYSTEM_TORCH") else ()
there = {package.name.lower(): package.version for package in importlib.metadata.distributions() if package.name}
for line in open("constraints.txt"):
    name = line.partition("==")[0].lower()
    print(f"{name}=={there[name]}" if name in kept and name in there else line.rstrip())
' >.venv/constraints.txt
  # shellcheck disable=SC2086  # one word a requirement
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
