#!/usr/bin/env bash
# Prepares this folder for a command: Debian packages, virtual environment, editable install.
#
#   scripts/setup.sh [java] [mariadb] [postgres] [zookeeper] [mysql] [brokers] [jars] [sysbench] [percona] [chromium]
#
# The words name what is needed beside Python. Nothing is done twice: what is there is left
# alone, and the Python packages are installed again only when pyproject.toml or their versions
# in constraints.txt have changed. Debian's packages come in beside Python's.
# Exit codes: 0 ready, 1 an installation failed, 2 something is missing that only an
# administrator can install (the message has the command).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv
STAMP=$VENV/.setup-stamp

say() { printf 'setup: %s\n' "$*" >&2; }

# --- Python ---------------------------------------------------------------------------------

python_is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local name
    for name in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
        # ensurepip is what Debian moves to python3-venv.
        if python_is_new_enough "$name" && "$name" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            printf '%s' "$name"
            return
        fi
    done
    return 1
}

venv_works() {
    [ -x "$VENV/bin/python" ] && python_is_new_enough "$VENV/bin/python" &&
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1
}

# --- What Debian gives ----------------------------------------------------------------------

java_is_new_enough() {
    local java=java version
    [ -n "${JAVA_HOME:-}" ] && java=$JAVA_HOME/bin/java
    version=$("$java" -version 2>&1 | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1) || return 1
    [ -n "$version" ] && [ "$version" -ge 17 ]
}

has_program() {
    local name=$1 folder
    shift
    for folder in /usr/sbin /usr/bin /usr/local/sbin /usr/local/bin "$@"; do
        [ -x "$folder/$name" ] && return 0
    done
    command -v "$name" >/dev/null 2>&1
}

packages=()
reasons=()
need() { # package... : reason
    local reason=${*: -1}
    packages+=("${@:1:$#-1}")
    reasons+=("$reason")
}

java_package() {
    local name
    for name in openjdk-17-jre-headless openjdk-21-jre-headless; do
        if apt-cache show "$name" >/dev/null 2>&1; then
            printf '%s' "$name"
            return
        fi
    done
    printf 'openjdk-17-jre-headless'
}

collect_missing() {
    local wanted
    if ! venv_works && ! find_python >/dev/null; then
        need python3 python3-venv "Python 3.11 or newer with venv"
    fi
    for wanted in "$@"; do
        case $wanted in
        java)
            java_is_new_enough || need "$(java_package)" "Java 17 or newer, for Spark"
            ;;
        mariadb)
            # The core packages hold the server without the system service.
            has_program mariadbd && has_program mariadb-install-db && has_program my_print_defaults ||
                need mariadb-server-core mariadb-client-core "MariaDB, started privately"
            # Its own reader, beside which the benchmarks put ours.
            has_program mariadb-binlog || need mariadb-client "mariadb-binlog"
            ;;
        postgres)
            has_program initdb /usr/lib/postgresql/*/bin ||
                need postgresql "PostgreSQL, started privately"
            ;;
        zookeeper)
            [ -e /usr/share/java/zookeeper.jar ] ||
                need zookeeper "ZooKeeper, started privately"
            ;;
        mysql | brokers | jars | sysbench | percona | chromium) ;; # may be missing: see below
        *)
            say "unknown word '$wanted'; known: java mariadb postgres zookeeper mysql brokers jars sysbench percona chromium"
            exit 1
            ;;
        esac
    done
}

# --- Installing packages --------------------------------------------------------------------

become_root() {
    if [ "$(id -u)" -eq 0 ]; then
        as_root=()
    elif command -v sudo >/dev/null 2>&1 && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        as_root=(sudo)
    else
        return 1
    fi
}

# Quiet; its output is shown if it fails.
apt() {
    local log outcome=0
    log=$(mktemp)
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive NEEDRESTART_MODE=l \
        apt-get -y -qq -o Dpkg::Use-Pty=0 -o DPkg::Lock::Timeout=300 "$@" >"$log" 2>&1 || outcome=$?
    [ "$outcome" -eq 0 ] || tail -n 40 "$log" >&2
    rm -f "$log"
    return "$outcome"
}

# Debian's postgresql package makes a cluster and starts it. The setup does not need it, so the
# cluster is switched off while it is installed, and the setting is put back afterwards.
CLUSTER_CONF=/etc/postgresql-common/createcluster.conf

without_main_cluster() {
    local outcome=0 before=
    if [ -e "$CLUSTER_CONF" ]; then
        before=$(cat "$CLUSTER_CONF" && printf .)
    fi
    "${as_root[@]}" mkdir -p "${CLUSTER_CONF%/*}"
    printf '%screate_main_cluster = false\n' "${before%.}" |
        "${as_root[@]}" tee "$CLUSTER_CONF" >/dev/null
    "$@" || outcome=$?
    if [ -n "$before" ]; then
        printf '%s' "${before%.}" | "${as_root[@]}" tee "$CLUSTER_CONF" >/dev/null
    elif [ -e /usr/share/postgresql-common/createcluster.conf ]; then
        "${as_root[@]}" cp /usr/share/postgresql-common/createcluster.conf "$CLUSTER_CONF"
        "${as_root[@]}" rm -f "$CLUSTER_CONF.ucf-dist"
    else
        "${as_root[@]}" rm -f "$CLUSTER_CONF"
    fi
    return "$outcome"
}

INSTALL=
# Ends the script where only an administrator can continue.
name_missing() {
    [ ${#packages[@]} -eq 0 ] && return
    local reason
    for reason in "${reasons[@]}"; do say "missing: $reason"; done
    INSTALL="apt-get update && apt-get install --no-install-recommends ${packages[*]}"
    if ! command -v apt-get >/dev/null 2>&1; then
        say "this is not a Debian system; install what is named above (in Debian: ${packages[*]})"
        exit 2
    fi
    if ! become_root; then
        say "installing it needs root or sudo. Ask an administrator to run:"
        say "    $INSTALL"
        say "and then give the same make command again."
        exit 2
    fi
}

install_missing() {
    [ ${#packages[@]} -eq 0 ] && return
    say "installing Debian packages: ${packages[*]}"
    apt update || say "apt-get update failed; trying with the package lists that are there"
    local run=(apt install --no-install-recommends "${packages[@]}")
    case " ${packages[*]} " in
    *" postgresql "*) run=(without_main_cluster "${run[@]}") ;;
    esac
    if ! "${run[@]}"; then
        say "apt-get failed; its messages are above. The command was:"
        say "    $INSTALL"
        exit 1
    fi
}

# --- The virtual environment ----------------------------------------------------------------

# What the environment was made from: the dependencies, and where the five rooms lie.
stamp_now() {
    { cat pyproject.toml scripts/constraints.txt; pwd -P; "$VENV/bin/python" --version; } | sha256sum
}

WANTED=(--constraint scripts/constraints.txt --editable '.[all,dev,docs]')

pip() { "$VENV/bin/python" -m pip "$@" --quiet --disable-pip-version-check --no-input; }

install_with_pip() { pip install --use-pep517 "${WANTED[@]}" >&2; }

# uv downloads, unpacks and compiles many packages at once, where pip takes them one by one.
install_with_uv() {
    local settings index more log=$VENV/uv.log
    # It does not read pip's settings: where pip's settings name an index, it gets the same one.
    settings=$("$VENV/bin/python" -m pip config list 2>/dev/null) || return 1
    index=$(sed -n "s/^[^=]*\.index-url='\(.*\)'$/\1/p" <<<"$settings" | tail -n 1)
    more=$(sed -n "s/^[^=]*\.extra-index-url='\(.*\)'$/\1/p" <<<"$settings" | tail -n 1)
    pip install --constraint scripts/constraints.txt uv >"$log" 2>&1 &&
        # Spark comes as its source: to compress its jars again would only take time.  A cache of
        # it takes 2 GB, which a machine that is thrown away has no use for.
        env ${index:+UV_DEFAULT_INDEX="$index"} ${more:+UV_INDEX="$more"} \
            "$VENV/bin/uv" pip install ${CI:+--no-cache} --quiet --python "$VENV/bin/python" \
            --compile-bytecode \
            --config-settings-package 'pyspark:--build-option=--compression=stored' \
            "${WANTED[@]}" >>"$log" 2>&1 && return
    say "uv could not (see $log); pip takes longer"
    return 1
}

install_python_packages() {
    if ! venv_works; then
        local python
        python=$(find_python) || { say "no Python 3.11 or newer with venv was found"; exit 1; }
        say "creating $VENV with $("$python" --version)"
        "$python" -m venv --clear "$VENV"
    fi
    [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(stamp_now)" ] && return
    say "installing Python packages into $VENV (the first time takes a minute or more; Spark is large)"
    if ! install_with_uv && ! install_with_pip; then
        say "pip failed; its messages are above. Check the network and run the command again."
        exit 1
    fi
    stamp_now >"$STAMP"
    say "$VENV is ready: $VENV/bin/databus --help"
}

# --- What may be missing --------------------------------------------------------------------

OPTIONAL_LIMIT_S=120

# Without it some tests are skipped with the reason; after a failure a day passes to the next try.
optional() { # name command...
    local name=$1 failed=$VENV/.$1-failed
    shift
    [ -z "$(find "$failed" -mmin -1440 2>/dev/null)" ] || return 0
    if ! timeout --kill-after=5 "$OPTIONAL_LIMIT_S" "$@" >"$VENV/$name.log" 2>&1 </dev/null; then
        touch "$failed"
        say "there is no $name (see $VENV/$name.log): the tests that need it will be skipped"
    fi
}

fetch_optional() {
    local wanted
    for wanted in "$@"; do
        case $wanted in
        mysql)
            # Unpacked, not installed: it needs no lock of apt's.
            [ -n "${DATABUS_MYSQL_ROOT:-}" ] || optional mysql scripts/mysql.sh &
            ;;
        brokers)
            # Redis and NATS, as Debian has them; unpacked, so that no service starts.
            has_program redis-server && has_program nats-server ||
                optional brokers scripts/brokers.sh &
            ;;
        jars)
            # Debezium and Kafka, beside which tests run ours.
            optional jars scripts/jars.sh debezium kafka opensearch &
            ;;
        sysbench)
            has_program sysbench || { become_root &&
                optional sysbench "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive sh -c \
                    'apt-get -qq update; apt-get -y -qq -o DPkg::Lock::Timeout=60 install --no-install-recommends sysbench'; } ||
                true
            ;;
        percona)
            has_program pt-online-schema-change || { become_root &&
                optional percona "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive sh -c \
                    'apt-get -qq update; apt-get -y -qq -o DPkg::Lock::Timeout=60 install --no-install-recommends percona-toolkit'; } ||
                true
            ;;
        chromium)
            # Only the download has a limit: dpkg must not end in the middle.
            has_program chromium || { become_root &&
                optional chromium "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive sh -c \
                    'apt-get -qq update; apt-get -y -qq -o DPkg::Lock::Timeout=60 install --no-install-recommends -d chromium' &&
                apt install --no-install-recommends --no-download chromium 2>/dev/null; } || true
            ;;
        esac
    done
    wait
}

# --------------------------------------------------------------------------------------------

# Two make commands at once wait for each other instead of installing over each other.
exec 9<scripts/setup.sh
flock 9

collect_missing "$@"
name_missing
# However this ends, apt does not end in the middle.
trap wait EXIT
install_missing &
debian=$!
# Python itself may be among Debian's packages.
venv_works || find_python >/dev/null || wait "$debian"
install_python_packages
wait "$debian"
fetch_optional "$@"
