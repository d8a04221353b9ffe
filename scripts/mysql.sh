#!/bin/sh
# mysql.sh FOLDER: unpack a MySQL server into FOLDER, for tests/integration/test_mysql_*.py.
#
# Debian's stable releases carry MariaDB alone, so this is Debian sid's package in a folder of its
# own (a chroot); nothing is installed on this machine.  Needs root, and a few minutes.
# Then: DATABUS_MYSQL_ROOT=FOLDER pytest tests/integration/test_mysql_source.py
set -eu

root=${1:?usage: scripts/mysql.sh FOLDER}
mirror=${DEBIAN_MIRROR:-$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources | head -n 1)}

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
if command -v debootstrap >/dev/null; then
  debootstrap=debootstrap
else
  (cd "$tools" && apt-get download -q debootstrap && dpkg-deb -x debootstrap_*.deb .)
  DEBOOTSTRAP_DIR=$tools/usr/share/debootstrap
  export DEBOOTSTRAP_DIR
  debootstrap=$tools/usr/sbin/debootstrap
fi

"$debootstrap" --variant=minbase sid "$root" "$mirror"
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d" # starts no services
chmod +x "$root/usr/sbin/policy-rc.d"
DEBIAN_FRONTEND=noninteractive chroot "$root" \
  apt-get install -y --no-install-recommends mysql-server-core
chroot "$root" mysqld --version
