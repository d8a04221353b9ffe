#!/usr/bin/env bash
# matrix.sh [--short] [NAME-VERSION...]: run a lean set of tests on every server of servers.sh.
#
# --short runs the tests of types, rights and names only, in a minute; `make test` does on one server.
# The tests are those of the suite; a variable names the server that they run on. A server that is
# not there is skipped, with the reason, and counted. Exit codes: 0 every server that ran passed, 1 one failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

cache=${XDG_CACHE_HOME:-$HOME/.cache}/databus-servers
short=
[ "${1:-}" != --short ] || { short=yes; shift; }
wanted=("$@")
[ ${#wanted[@]} -gt 0 ] || mapfile -t wanted < <(scripts/servers.sh --list)
ready=$(timeout 600 scripts/servers.sh "${wanted[@]}") || true

I=tests/integration
# Types, definitions, dumps, restarts, failover, names, rights: by server.
mysql=($I/test_mysql_types.py $I/test_mysql_source.py $I/test_mysql_failover.py
    $I/test_binlog_sources.py $I/test_reset_binlog.py $I/test_dotted_names.py
    $I/test_least_privileges.py $I/test_online_schema_changes.py)
mysql_short=($I/test_mysql_types.py $I/test_binlog_sources.py $I/test_dotted_names.py
    $I/test_least_privileges.py)
mariadb=($I/test_mariadb_types.py $I/test_mariadb_source.py $I/test_mariadb_dumps.py
    $I/test_failover.py $I/test_binlog_sources.py $I/test_reset_binlog.py $I/test_dotted_names.py
    $I/test_least_privileges.py)
postgres=($I/test_postgres_types.py $I/test_postgres_schemas.py $I/test_postgres_source.py
    $I/test_postgres_tables.py $I/test_postgres_preflight.py $I/test_postgres_publications.py
    $I/test_postgres_dropped.py $I/test_postgres_renamed.py
    $I/test_postgres_publication_gone.py $I/test_postgres_moved_files.py
    $I/test_postgres_definitions.py $I/test_postgres_dumps.py $I/test_postgres_encodings.py
    $I/test_postgres_hostile.py $I/test_failover.py
    $I/test_dotted_names.py $I/test_failover_slots.py $I/test_least_privileges.py)

scratch=
trap '[ -z "$scratch" ] || rm -rf "$scratch"' EXIT

root_of() { # PostgreSQL refuses root, and its account has to reach the programs.
    local name=$1
    if [[ $name == postgres-* ]] && [ "$(id -u)" -eq 0 ]; then
        scratch=${scratch:-$(mktemp -d /tmp/databus-servers.XXXXXX)}
        chmod 755 "$scratch"
        [ -d "$scratch/$name" ] || cp -r "$cache/$name" "$scratch/$name"
        echo "$scratch/$name"
    else
        echo "$cache/$name"
    fi
}

passed=() failed=() skipped=()
for name in "${wanted[@]}"; do
    if ! grep -qx "$name" <<<"$ready"; then
        skipped+=("$name")
        continue
    fi
    product=${name%%-*}
    declare -n tests=$product${short:+_short}
    echo "== $name"
    variable=DATABUS_${product^^}_ROOT
    root_of "$name" >/dev/null
    if env "$variable=$(root_of "$name")" DATABUS_TEST_PRODUCT="$product" \
        .venv/bin/python -m pytest -q -p no:cacheprovider ${MATRIX_PYTEST:--n 0} "${tests[@]}"; then
        passed+=("$name")
    else
        failed+=("$name")
    fi
done
echo "== matrix: ${#passed[@]} passed (${passed[*]-}), ${#failed[@]} failed (${failed[*]-}), ${#skipped[@]} skipped (${skipped[*]-})"
[ ${#failed[@]} -eq 0 ]
