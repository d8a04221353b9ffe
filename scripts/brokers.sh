#!/usr/bin/env bash
# brokers.sh [FOLDER]: unpack NATS and Redis into FOLDER, for the tests of their sinks and the benchmarks.
#
# apt resolves, downloads and verifies Debian's packages; they are unpacked, not installed, so that
# no service starts. FOLDER is ~/.cache/databus-brokers unless it is given; they are found
# there, or where DATABUS_BROKERS says, or on the PATH. What is there already is left alone.
set -euo pipefail

folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/databus-brokers}
[ -x "$folder/usr/bin/redis-server" ] && [ -x "$folder/usr/sbin/nats-server" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
    echo "brokers.sh: apt-get and dpkg-deb are needed" >&2
    exit 1
}

mkdir -p "${folder%/*}"
work=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' INT TERM
mkdir -p "$work"/{state/lists/partial,cache/archives/partial,root}
own=(
    -qq
    -o Dir::State="$work/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$work/cache"
    # Nothing is installed: it needs no lock of dpkg's, which an installation beside it may hold.
    -o Debug::NoLocking=true
    -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::PDiffs=false
    -o Acquire::Retries=2 -o Acquire::http::Timeout=20
)
apt-get "${own[@]}" update
apt-get "${own[@]}" --yes --no-install-recommends --download-only --reinstall install \
    nats-server redis-server libjemalloc2 liblzf1 liblua5.1-0 lua-cjson lua-bitop libhiredis0.14
for package in "$work"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
        tar -x -C "$work/root" --no-same-owner --exclude='./usr/share/doc' --exclude='./usr/share/man'
done
rm -rf "$folder"
mv "$work/root" "$folder"
echo "brokers.sh: $folder holds nats-server and redis-server" >&2
