#!/usr/bin/env bash
# gh_ost.sh [FOLDER]: build gh-ost, the online schema change tool, for the tests.
#
# gh-ost is a Go module: the Go tool resolves, downloads and verifies it, and builds it into FOLDER
# (~/.cache/databus-gh-ost unless it is given). What is there already is left alone. The tests find
# it there, or where DATABUS_GH_OST says; without Go, and without gh-ost, they are skipped.
set -euo pipefail

version=v1.1.6 # The module proxy has neither 1.1.7 nor a list of the versions.
folder=${1:-${XDG_CACHE_HOME:-$HOME/.cache}/databus-gh-ost}

[ -x "$folder/gh-ost" ] && exit 0
command -v go >/dev/null || {
    echo "gh_ost.sh: Go is needed to build gh-ost" >&2
    exit 1
}
mkdir -p "$folder"
scratch=$(mktemp -d "$folder/build.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
# A module that requires it: `go install MODULE@VERSION` would ask for the list of versions.
printf 'module build\n\ngo 1.21\n\nrequire github.com/github/gh-ost %s\n' "$version" >"$scratch/go.mod"
cd "$scratch"
GOBIN=$folder GOFLAGS=-mod=mod go install github.com/github/gh-ost/go/cmd/gh-ost
