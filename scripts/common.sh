# Sourced by the other scripts, from the root of the project.

CACHE=${LOCKSTEP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}}/lockstep
UV=
PYTHON=

die() {
    printf 'lockstep: %s\n' "$*" >&2
    exit 1
}

say() {
    printf 'lockstep: %s\n' "$*" >&2
}

can_apt() {
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null
}

# Install Debian packages: the first name that exists, quietly. Fails where apt cannot.
apt_install() {
    local name
    [[ -n ${APT_UPDATED:-} ]] || DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2 || return 1
    APT_UPDATED=yes
    for name in "$@"; do
        say "installing the Debian package $name"
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$name" \
            >/dev/null </dev/null && return 0
    done
    return 1
}

# Set PYTHON to an interpreter that is new enough.
find_python() {
    local name
    for name in ${LOCKSTEP_PYTHON:-} python3 python3.11 python3.12 python3.13 python; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            # A pyenv shim is not the interpreter; ask it where that is.
            PYTHON=$("$name" -c 'import sys; print(sys.executable)')
            return
        fi
    done
    can_apt && apt_install python3 && PYTHON=$(command -v python3) \
        && "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' && return
    die "Python 3.11 or newer is needed and was not found. Install it, or name it in LOCKSTEP_PYTHON."
}

# uv reads neither pip's configuration nor, by default, the system's certificates; a machine that is set
# up for pip should work as it is.
uv_like_pip() {
    export UV_NO_PROGRESS=1 UV_PYTHON_DOWNLOADS=never
    if [[ -z ${SSL_CERT_FILE:-} && -e /etc/ssl/certs/ca-certificates.crt ]]; then
        export UV_SYSTEM_CERTS=1
    fi
    if [[ -z ${UV_INDEX_URL:-}${UV_DEFAULT_INDEX:-} ]]; then
        local index
        index=${PIP_INDEX_URL:-$("$1" -m pip config get global.index-url 2>/dev/null || true)}
        [[ -z $index ]] || export UV_DEFAULT_INDEX=$index
    fi
}

# Set UV to the pinned uv in the cache, which is installed there first if it is missing.
uv_into_cache() {
    local version home fresh
    version=$(sed -n 's/^uv==\([0-9.]*\).*/\1/p' requirements/uv.txt)
    home=$CACHE/uv-$version
    UV=$home/bin/uv
    [[ -n $PYTHON ]] || find_python
    if ! "$UV" --version >/dev/null 2>&1; then
        say "installing uv $version into $home"
        rm -rf "$home"
        mkdir -p "$CACHE"
        fresh=$(mktemp -d "$CACHE/uv.XXXXXX")
        pip_install_into "$fresh" || {
            rm -rf "$fresh"
            die "uv $version could not be installed with $PYTHON. Its message is above."
        }
        mv "$fresh" "$home"
    fi
    uv_like_pip "$PYTHON"
}

# Debian's Python may come without pip and without venv; any of the two is enough.
pip_install_into() {
    export PIP_ROOT_USER_ACTION=ignore
    local options=(install --quiet --disable-pip-version-check --require-hashes --no-deps --only-binary :all:
        --target "$1" -r requirements/uv.txt)
    if "$PYTHON" -m pip --version >/dev/null 2>&1; then
        "$PYTHON" -m pip "${options[@]}"
        return
    fi
    if ! "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
        can_apt && apt_install python3-venv || die "$PYTHON has neither pip nor venv. Install python3-venv."
    fi
    "$PYTHON" -m venv "$1/venv" && "$1/venv/bin/python" -m pip "${options[@]}" && rm -rf "$1/venv"
}
