#!/usr/bin/env bash
# Everything that the project needs: .venv, and Java, PostgreSQL, ZooKeeper, uv and the Iceberg JVM runtime outside the tree.
# Does nothing, silently, when all of it is there.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/common.sh

STAMP=.venv/.lockstep-setup

main() {
    local wanted
    ensure_java
    ensure_postgresql
    ensure_zookeeper
    wanted=$(fingerprint)
    if [[ $(cat "$STAMP" 2>/dev/null) == "$wanted" ]] && .venv/bin/python -c '' 2>/dev/null && jars_present; then
        return
    fi
    # Two at a time would write the same files.
    mkdir -p "$CACHE"
    exec 9>"$CACHE/setup.lock"
    flock 9
    ensure_venv
    ensure_jars
    printf '%s\n' "$wanted" >"$STAMP"
    say "ready: .venv/bin/lockstep"
}

# A clone that was moved needs its environment again: the paths in it are absolute.
fingerprint() {
    { cat requirements/dev.txt requirements/uv.txt pyproject.toml scripts/jars.txt && pwd; } | sha256sum
}

ensure_venv() {
    uv_into_cache
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

# Tests start servers of their own; the one that the Debian package would run is not wanted.
ensure_postgresql() {
    if command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null; then
        return
    fi
    # Only tests need it, and they say so themselves: everything else works without.
    if ! can_apt; then
        say "no PostgreSQL server is here, which \`make test\` needs (Debian: apt-get install postgresql)"
        return
    fi
    apt_install postgresql-common || die "PostgreSQL could not be installed. The message of apt-get is above."
    local settings=/etc/postgresql-common/createcluster.conf
    if ! grep -qs '^create_main_cluster' "$settings"; then
        echo 'create_main_cluster = false' >>"$settings"
    fi
    apt_install postgresql || die "PostgreSQL could not be installed. The message of apt-get is above."
}

# Only its jar is used: tests start servers of their own. The system service is another package, zookeeperd.
ensure_zookeeper() {
    [[ ! -e ${LOCKSTEP_ZOOKEEPER_JARS:-/usr/share/java}/zookeeper.jar ]] || return 0
    if ! can_apt; then
        say "no ZooKeeper is here, which \`make test\` needs (Debian: apt-get install zookeeper)"
        return
    fi
    apt_install zookeeper || die "ZooKeeper could not be installed. The message of apt-get is above."
}

jar_path() { # COORDINATES
    local artifact=${1#*:}
    printf '%s/jars/%s.jar' "$CACHE" "${artifact/:/-}"
}

# Succeeds if every jar is there. They were checked when they came, and appear in one step.
jars_present() {
    local coordinates
    while read -r coordinates _; do
        [[ -e $(jar_path "$coordinates") ]] || return 1
    done < <(grep -v '^#' scripts/jars.txt)
}

ensure_jars() {
    local coordinates checksum
    while read -r coordinates checksum; do
        [[ -e $(jar_path "$coordinates") ]] || fetch_jar "$coordinates" "$checksum"
    done < <(grep -v '^#' scripts/jars.txt)
}

fetch_jar() { # COORDINATES SHA256
    local path fresh jar
    path=$(jar_path "$1")
    if ! command -v mvn >/dev/null; then
        can_apt && apt_install maven || die "Maven is needed to fetch $1. Install it (Debian: maven)."
    fi
    say "fetching $1"
    mkdir -p "$CACHE/jars"
    fresh=$(mktemp -d "$CACHE/jars/fetch.XXXXXX")
    jar=$fresh/${path##*/}
    if ! mvn -q -B org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy \
        -Dartifact="$1" -DoutputDirectory="$fresh" </dev/null >"$fresh/log" 2>&1; then
        cat "$fresh/log" >&2
        rm -rf "$fresh"
        die "Maven could not fetch $1. Its message is above."
    fi
    if ! echo "$2  $jar" | sha256sum --check --quiet - >&2; then
        rm -rf "$fresh"
        die "$1 is not the file that scripts/jars.txt names. It was thrown away: clear it from ~/.m2 and try again."
    fi
    mv "$jar" "$path"
    rm -rf "$fresh"
}

main
