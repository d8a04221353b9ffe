#!/usr/bin/env bash
# release.sh: build what a release consists of into dist/, from the tag that HEAD has.
#
# The tag is vX.Y.Z; pyproject.toml must have the same version and CHANGELOG.md a section of it.
# Exit codes: 0 built, 1 a build failed, 2 tag, version, changelog and tree do not agree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'release: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }

tag=$(git describe --tags --exact-match 2>/dev/null) ||
    refuse "HEAD has no tag. Tag it: git tag vX.Y.Z"
[[ $tag =~ ^v([0-9]+\.[0-9]+\.[0-9]+)$ ]] || refuse "the tag $tag is not of the form vX.Y.Z"
version=${BASH_REMATCH[1]}
declared=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ "$declared" = "$version" ] ||
    refuse "the tag is $tag, but pyproject.toml has version $declared. Change one of them"
grep -q "^## $version\b" CHANGELOG.md ||
    refuse "CHANGELOG.md has no section '## $version'. Rename '## Unreleased'"
[ -z "$(git status --porcelain)" ] || refuse "the tree has changes that are not committed"

rm -rf dist
.venv/bin/python -m hatchling build
# What `docker build -f docker/Dockerfile` needs, and nothing else.
git archive --format=tar.gz --prefix="databus-$version/" -o "dist/databus-$version-image.tar.gz" HEAD \
    pyproject.toml README.md LICENSE docker relay bootstrap client common cli
ls -l dist >&2
