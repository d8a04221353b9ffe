#!/usr/bin/env bash
# jars.sh debezium|kafka|opensearch...: fetch a product's jars from Maven Central for the tests and benchmarks.
#
# They go to ~/.cache/databus-jars/<product>-<version>, where the tests look for them; the versions
# are those of tests/support/maven_jars.py.  What is there already is left alone.  Needs mvn.
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/databus-jars

version_of() { sed -n "s/^VERSIONS.*\"$1\": \"\([^\"]*\)\".*/\1/p" "$here/tests/support/maven_jars.py"; }

artifacts_of() {
    case $1 in
    debezium) printf 'io.debezium:debezium-%s ' embedded connector-mariadb connector-mysql connector-postgres ;;
    kafka) echo org.apache.kafka:kafka_2.13 ;;
    opensearch)
        # The server's own launcher brings log4j-core.
        echo org.opensearch:opensearch org.opensearch.plugin:transport-netty4-client \
            org.apache.logging.log4j:log4j-core:2.21.0
        ;;
    *) echo "jars.sh: $1 is unknown; choose debezium, kafka or opensearch" >&2 && exit 2 ;;
    esac
}

command -v mvn >/dev/null || {
    echo "jars.sh: mvn is needed" >&2
    exit 1
}
for product in "$@"; do
    artifacts=$(artifacts_of "$product")
    version=$(version_of "$product")
    folder=$cache/$product-$version
    [ -d "$folder" ] && continue
    mkdir -p "$cache"
    scratch=$(mktemp -d "$folder.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    {
        echo '<project><modelVersion>4.0.0</modelVersion>'
        echo "<groupId>databus</groupId><artifactId>jars</artifactId><version>1</version><dependencies>"
        for artifact in $artifacts; do
            IFS=: read -r group name own <<<"$artifact"
            echo "<dependency><groupId>$group</groupId><artifactId>$name</artifactId>"
            echo "<version>${own:-$version}</version></dependency>"
        done
        echo "</dependencies></project>"
    } >"$scratch/pom.xml"
    mvn -q -B -f "$scratch/pom.xml" dependency:copy-dependencies -DincludeScope=runtime \
        -DoutputDirectory="$scratch/jars"
    mv "$scratch/jars" "$folder"
    rm -rf "$scratch"
    echo "jars.sh: $folder has $(find "$folder" -name '*.jar' | wc -l) jars" >&2
done
