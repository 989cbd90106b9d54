#!/usr/bin/env bash
# Everything that the project needs: .venv and the Iceberg JVM runtime, and the servers that `make test` starts, outside the
# tree. `setup.sh base` leaves the servers out. Does nothing, silently, when all of it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh
source scripts/jars.sh
source scripts/servers.sh

STAMP=.venv/.lockstep-setup

main() { # [base]
    local wanted with_servers=yes
    [[ ${1:-} != base ]] || with_servers=
    ensure_java
    wanted=$(fingerprint)
    if is_ready "$wanted" && { [[ -z $with_servers ]] || servers_present; }; then
        return
    fi
    # Two at a time would write the same files.
    mkdir -p "$CACHE"
    exec 9>"$CACHE/setup.lock"
    flock 9
    uv_into_cache
    # The longest piece of work goes first, beside the others.
    [[ -z $with_servers ]] || start_go_servers
    if ! is_ready "$wanted"; then
        ensure_venv
        ensure_jars jars jars.txt
        printf '%s\n' "$wanted" >"$STAMP"
    fi
    [[ -z $with_servers ]] || ensure_servers
    say "ready: .venv/bin/lockstep"
}

is_ready() { # FINGERPRINT
    [[ $(cat "$STAMP" 2>/dev/null) == "$1" ]] && .venv/bin/python -c '' 2>/dev/null && jars_present jars jars.txt
}

# A clone that was moved needs its environment again: the paths in it are absolute.
fingerprint() {
    { cat requirements/dev.txt requirements/uv.txt pyproject.toml scripts/jars.txt && pwd; } | sha256sum
}

ensure_venv() {
    if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        say "creating .venv with $PYTHON"
        "$UV" venv --quiet --clear --python "$PYTHON" .venv
    fi
    say "installing the pinned dependencies into .venv"
    export VIRTUAL_ENV=$PWD/.venv
    # Compiled now: the first command of a user should not pay for it.
    "$UV" pip sync --quiet --compile-bytecode --require-hashes requirements/dev.txt
    "$UV" pip install --quiet --no-deps --no-build-isolation --editable .
    .venv/bin/python -m compileall -q src
}

# The Java that Spark will take: JAVA_HOME first, then the path.
java_version() {
    local java=java
    [[ -z ${JAVA_HOME:-} ]] || java=$JAVA_HOME/bin/java
    "$java" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -n 1
}

ensure_java() {
    local version
    version=$(java_version || true)
    [[ ${version:-0} -lt 17 ]] || return 0
    if can_apt && apt_install openjdk-17-jre-headless openjdk-21-jre-headless; then
        version=$(java_version || true)
        [[ ${version:-0} -lt 17 ]] || return 0
    fi
    local found="none was found"
    [[ -z $version ]] || found="the one in ${JAVA_HOME:-the PATH} is version $version"
    die "Spark needs Java 17 or newer, and $found." \
        "Install one (Debian: apt-get install openjdk-17-jre-headless) or point JAVA_HOME to it."
}

main "$@"
