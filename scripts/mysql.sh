#!/usr/bin/env bash
# mysql.sh [FOLDER]: unpack a MySQL server into FOLDER for the tests; `make test` calls it.
#
# Debian's stable releases carry MariaDB alone, so this takes the package of Debian's unstable
# release, and the libraries that it needs, out of Debian's pool: apt resolves, downloads and
# verifies them with lists and a cache of its own, and they are unpacked, not installed. The
# server runs with that folder's loader and libraries. Neither root nor a chroot is needed.
# FOLDER is ~/.cache/databus-mysql unless it is given; the tests find it there, or where
# DATABUS_MYSQL_ROOT says. What is there already is left alone.
set -euo pipefail

folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/databus-mysql}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg

[ -x "$folder/usr/sbin/mysqld" ] && exit 0
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || {
    echo "mysql.sh: apt-get and dpkg-deb are needed" >&2
    exit 1
}

# Debian's mirror is the one that this machine's apt uses.
targets=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages')
mirror=${DEBIAN_MIRROR:-$(grep -v security <<<"$targets" | grep -m1 '/debian' || true)}
[ -n "$mirror" ] || {
    echo "mysql.sh: apt knows no mirror of Debian; name one with DEBIAN_MIRROR" >&2
    exit 1
}

mkdir -p "${folder%/*}"
scratch=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' INT TERM
mkdir -p "$scratch"/{state/lists/partial,cache/archives/partial,none} "$scratch/tree"/{usr/lib,usr/bin,usr/sbin,usr/lib64}
# The links of a merged /usr, which the packages expect to find.
for name in lib bin sbin lib64; do ln -s "usr/$name" "$scratch/tree/$name"; done
: >"$scratch/status"
signed=
[ -e "$keyring" ] && signed=" signed-by=$keyring"
echo "deb [arch=$(dpkg --print-architecture)$signed] $mirror sid main" >"$scratch/sources.list"

own=(
    -qq
    -o Dir::Etc::SourceList="$scratch/sources.list" -o Dir::Etc::SourceParts="$scratch/none"
    -o Dir::Etc::Preferences="$scratch/none/preferences" -o Dir::Etc::PreferencesParts="$scratch/none"
    -o Dir::State="$scratch/state" -o Dir::State::status="$scratch/status" -o Dir::Cache="$scratch/cache"
    -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::PDiffs=false
    -o Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled=false
    -o Acquire::Retries=2 -o Acquire::http::Timeout=20
)
apt-get "${own[@]}" update
apt-get "${own[@]}" --yes --no-install-recommends --download-only install mysql-server-core
for package in "$scratch"/cache/archives/*.deb; do
    case ${package##*/} in perl* | libperl* | debconf* | dpkg* | tar* | libgdbm*) continue ;; esac
    dpkg-deb --fsys-tarfile "$package" |
        tar -x -C "$scratch/tree" --keep-directory-symlink --no-same-owner \
            --exclude='./usr/share/doc' --exclude='./usr/share/man' --exclude='./usr/share/locale' \
            --exclude='./usr/lib/*/gconv'
done
find "$scratch/tree/usr/bin" ! -name mysqlbinlog -type f -delete
rm -rf "$folder"
mv "$scratch/tree" "$folder"
echo "mysql.sh: $folder holds a MySQL server ($(du -sm "$folder" | cut -f1) MB)" >&2
