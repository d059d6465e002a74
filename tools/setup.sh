#!/usr/bin/env bash
# Makes .venv with everything that training and the tests need. Run it again at any time: it does only what is missing.
#
#   bash tools/setup.sh [EXTRAS]          EXTRAS is an extra of setup.py: "examples", "test" (the default) or "dev"
#   bash tools/setup.sh resolve VERSION   finds out whether all can be installed on Python VERSION; installs nothing
#
# PYTHON=/path/to/python chooses the interpreter; otherwise Python 3.10 or 3.9 is looked for on the PATH, under pyenv, and
# asked of uv.

set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
# Written last, so that a .venv without it is known to be incomplete.
STAMP="$VENV/.setup-stamp"
# There while packages are being installed: pip may take a package that it was interrupted in for an installed one.
UNFINISHED="$VENV/.setup-unfinished"
LOCK="$VENV.lock"
# Each of these extras includes those before it.
LEVELS=(examples test dev)
# OneFlow 0.9 has wheels for these, best first.
VERSIONS=(3.10 3.9)
# Later versions of flowvision import what OneFlow 0.9 does not have.
LIBAI=(flowvision==0.1.0 LiBai==0.1.1)

say() {
    printf 'setup: %s\n' "$*"
}

fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# Whether $1 runs and is CPython $2. A pyenv shim may exist and refuse.
is_python() {
    local probe='import platform, sys; print(platform.python_implementation(), "%d.%d" % sys.version_info[:2])'
    [[ "$("$1" -c "$probe" 2>/dev/null </dev/null)" == "CPython $2" ]]
}

# Whether the interpreter $1 can make a virtual environment with pip in it. Debian packs that apart.
has_venv() {
    "$1" -c 'import ensurepip, venv' >/dev/null 2>&1 </dev/null
}

# Prints each program called $1 on the PATH.
on_path() {
    type -aP "$1" || true
}

# Prints each interpreter of version $1 under the pyenv root, newest patch first.
under_pyenv() {
    local root="${PYENV_ROOT:-${HOME:-}/.pyenv}"
    local candidate
    for candidate in "$root/versions/$1"/bin/python "$root/versions/$1"[.-]*/bin/python; do
        if [[ -x "$candidate" ]]; then printf '%s\n' "$candidate"; fi
    done | sort -rV
}

# Prints the interpreter of version $1 that uv knows, or else fetches.
from_uv() {
    command -v uv >/dev/null || return 0
    uv python find --system "$1" 2>/dev/null </dev/null && return 0
    say "asking uv for Python $1" >&2
    uv python install "$1" >&2 </dev/null || return 0
    uv python find --system "$1" 2>/dev/null </dev/null || true
}

# Prints the first of the candidates on stdin that is Python $1 and can make .venv.
first_usable() {
    local candidate
    while IFS= read -r candidate; do
        # An activated .venv is no interpreter to make .venv from.
        if [[ "$candidate" == "$VENV"/* ]] || ! is_python "$candidate" "$1"; then continue; fi
        if has_venv "$candidate"; then
            printf '%s\n' "$candidate"
            return 0
        fi
        say "passing over $candidate, which lacks venv or ensurepip (on Debian: apt install python$1-venv)" >&2
    done
    return 1
}

# Prints the interpreter to make .venv with.
find_python() {
    local version
    if [[ -n "${PYTHON:-}" ]]; then
        for version in "${VERSIONS[@]}"; do
            if first_usable "$version" <<<"$PYTHON"; then return 0; fi
        done
        fail "PYTHON=$PYTHON is not a CPython 3.9 or 3.10 that runs and has venv and ensurepip; unset it or give another"
    fi
    for version in "${VERSIONS[@]}"; do
        if first_usable "$version" < <(on_path "python$version" && on_path python3 && on_path python); then return 0; fi
        if first_usable "$version" < <(under_pyenv "$version"); then return 0; fi
    done
    for version in "${VERSIONS[@]}"; do
        if first_usable "$version" < <(from_uv "$version"); then return 0; fi
    done
    fail "found no Python 3.10 or 3.9, which OneFlow 0.9 needs; install one:" \
        "pyenv install 3.10, or uv python install 3.10, or apt install python3.10-venv"
}

# Prints the file that pins the versions for the Python of .venv.
constraints() {
    local version
    version="$("$VENV/bin/python" --version 2>&1 || true)"
    version="${version#Python }"
    printf '%s\n' "$ROOT/tools/constraints-${version%.*}.txt"
}

# Prints what an environment made from this setup.py, and these versions, with the extras $1 is stamped with.
stamp_for() {
    local sum
    sum="$(cat "$ROOT/setup.py" "$(constraints)" 2>&1 | sha256sum)"
    printf '%s %s %s\n' "$1" "$("$VENV/bin/python" --version 2>&1 || true)" "${sum%% *}"
}

# Whether the extras $1 include the extras $2.
includes() {
    local level seen=""
    for level in "${LEVELS[@]}"; do
        if [[ "$level" == "$2" ]]; then seen=yes; fi
        if [[ "$level" == "$1" ]]; then break; fi
    done
    [[ -n "$seen" ]]
}

# Whether .venv is complete, up to date with setup.py, and has the extras $1.
is_ready() {
    local stamp current
    [[ -f "$STAMP" ]] || return 1
    stamp="$(<"$STAMP")"
    current="$(stamp_for "$1")"
    [[ "${stamp#* }" == "${current#* }" ]] && includes "${stamp%% *}" "$1"
}

# Whether .venv was made to its end and has pip, so that packages can be installed or brought up to date in it.
is_sound() {
    [[ ! -e "$UNFINISHED" ]] &&
        "$VENV/bin/python" -c 'import pip, sys; sys.exit(not (3, 9) <= sys.version_info[:2] <= (3, 10))' 2>/dev/null
}

# Makes the virtual environment $2 with the interpreter $1.
new_venv() {
    # The pip that Python 3.9 brings along leaves a file of certificates in the temporary folder.
    mkdir -p "$2/tmp"
    TMPDIR="$2/tmp" "$1" -m venv "$2" && rm -rf "$2/tmp"
}

make_venv() {
    local python
    python="$(find_python)"
    say "making $VENV with $python ($("$python" --version 2>&1))"
    rm -rf "$VENV"
    new_venv "$python" "$VENV" || fail "$python could not make a virtual environment; see above"
}

install_packages() {
    local pip=("$VENV/bin/python" -m pip install --disable-pip-version-check)
    local bar=off
    if [[ -t 1 ]]; then bar=on; fi
    say "installing libai_data[$1] and what it needs: 2 GB (for the tests, 4), minutes the first time"
    touch "$UNFINISHED"
    # The first pip that installs a pyproject.toml project editable.
    "${pip[@]}" --quiet 'pip>=21.3' || fail "pip could not update itself; see above, then run this again"
    "${pip[@]}" --progress-bar "$bar" --constraint "$(constraints)" --editable "${ROOT}[$1]" ||
        fail "pip could not install the packages; see above, then run this again"
    case "$1" in test | dev) install_libai ;; esac
    rm -f "$UNFINISHED"
}

# LiBai, whose own trainer some tests run. Its requirements do not all go with OneFlow 0.9; setup.py asks for those it needs.
install_libai() {
    "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-build-isolation --no-deps "${LIBAI[@]}" ||
        say "pip could not install ${LIBAI[*]}, which a C++ compiler builds (see above); the tests inside LiBai will be skipped"
}

# OneFlow tells of missing GPUs on import, which is of interest only when it fails.
check_import() {
    local output
    output="$("$VENV/bin/python" -c 'import libai_data, oneflow' 2>&1)" || fail "OneFlow does not import: $output"
}

# Until this process ends, others that set up the same .venv wait.
take_lock() {
    exec 9>"$LOCK"
    if ! flock -n 9; then
        say "waiting for another setup of $VENV to end"
        flock 9
    fi
}

# Has pip find versions of everything for Python $1.
resolve() {
    VERSIONS=("$1")
    # PYTHON may name another version, for .venv.
    if [[ -n "${PYTHON:-}" ]] && ! is_python "$PYTHON" "$1"; then PYTHON=""; fi
    local python
    python="$(find_python)"
    folder="$(mktemp -d)"
    # Not local, so that it is known when the script ends.
    trap 'rm -rf "$folder"' EXIT
    new_venv "$python" "$folder"
    "$folder/bin/python" -m pip install --disable-pip-version-check --quiet --dry-run \
        --constraint "$ROOT/tools/constraints-$1.txt" --editable "${ROOT}[dev]"
}

main() {
    if [[ "${1:-}" == resolve ]]; then
        resolve "$2"
        return
    fi
    local extras="${1:-test}"
    includes dev "$extras" || fail "there are no extras $extras; there are ${LEVELS[*]}"
    if is_ready "$extras"; then return 0; fi
    [[ "$(uname -sm)" == "Linux x86_64" ]] || fail "OneFlow 0.9 has wheels for Linux on x86_64 only; this is $(uname -sm)"
    take_lock
    if is_ready "$extras"; then return 0; fi
    # What was set up with more keeps it when setup.py changes.
    if [[ -f "$STAMP" ]]; then
        local stamp
        stamp="$(<"$STAMP")"
        if includes "${stamp%% *}" "$extras"; then extras="${stamp%% *}"; fi
    fi
    rm -f "$STAMP"
    if ! is_sound; then make_venv; fi
    install_packages "$extras"
    check_import
    stamp_for "$extras" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "ready: $VENV"
}

if [[ "${BASH_SOURCE[0]}" == "$0" ]]; then
    main "$@"
fi
