# Sourced by setup.sh: jars of Maven in the cache. A list names coordinates (group:artifact:version[:classifier]) and SHA-256.

jar_path() { # FOLDER COORDINATES
    local artifact=${2#*:}
    printf '%s/%s/%s.jar' "$CACHE" "$1" "${artifact//:/-}"
}

missing_jars() { # FOLDER LIST
    local coordinates
    while read -r coordinates _; do
        [[ -e $(jar_path "$1" "$coordinates") ]] || printf '%s\n' "$coordinates"
    done < <(grep -v '^#' "scripts/$2")
}

# Succeeds if every jar is there. They were checked when they came, and appear in one step.
jars_present() { # FOLDER LIST
    [[ -z $(missing_jars "$@") ]]
}

# Bring what is missing into FOLDER, with one run of Maven.
ensure_jars() { # FOLDER LIST
    local missing fresh coordinates checksum jar
    missing=$(missing_jars "$@")
    [[ -n $missing ]] || return 0
    if ! command -v mvn >/dev/null; then
        can_apt && apt_install maven || die "Maven is needed to fetch jars. Install it (Debian: apt-get install maven)."
    fi
    say "fetching $(wc -l <<<"$missing") jars with Maven"
    mkdir -p "$CACHE/$1"
    fresh=$(mktemp -d "$CACHE/$1/fetch.XXXXXX")
    pom_of "$missing" >"$fresh/pom.xml"
    if ! mvn -q -B -f "$fresh/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies \
        -DexcludeTransitive=true -DoutputDirectory="$fresh" </dev/null >"$fresh/log" 2>&1; then
        cat "$fresh/log" >&2
        rm -rf "$fresh"
        die "Maven could not fetch the jars of scripts/$2. Its message is above."
    fi
    while read -r coordinates checksum; do
        grep -qxF "$coordinates" <<<"$missing" || continue
        jar=$fresh/$(basename "$(jar_path "$1" "$coordinates")")
        if ! echo "$checksum  $jar" | sha256sum --check --quiet - >&2; then
            rm -rf "$fresh"
            die "$coordinates is not the file that scripts/$2 names. It was thrown away: clear it from ~/.m2 and try again."
        fi
        mv "$jar" "$(jar_path "$1" "$coordinates")"
    done < <(grep -v '^#' "scripts/$2")
    rm -rf "$fresh"
}

pom_of() { # COORDINATES, one per line
    local group artifact version classifier
    echo '<project><modelVersion>4.0.0</modelVersion>'
    echo '<groupId>lockstep</groupId><artifactId>jars</artifactId><version>1</version><dependencies>'
    while IFS=: read -r group artifact version classifier; do
        echo "<dependency><groupId>$group</groupId><artifactId>$artifact</artifactId><version>$version</version>"
        [[ -z $classifier ]] || echo "<classifier>$classifier</classifier>"
        echo '</dependency>'
    done <<<"$1"
    echo '</dependencies></project>'
}
