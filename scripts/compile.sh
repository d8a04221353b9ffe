#!/usr/bin/env bash
# Does once what each start would do again: compiles the kernels, archives Spark's classes.
#
#   scripts/compile.sh [kernels] [spark-classes]
#
# scripts/setup.sh comes before. Nothing is done twice, and nothing fails without this: it is
# only slower without. Linters need none of it, so that they may run beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=.venv

say() { printf 'setup: %s\n' "$*" >&2; }

compile_kernels() {
    ! "$VENV/bin/python" -m databus.common.compiled.kernel_cache --check || return 0
    say "compiling the kernels (once; up to a minute)"
    "$VENV/bin/python" -m databus.common.compiled.kernel_cache
}

# Spark starts twice as fast with it, and as well, only slower, without.
archive_spark_classes() {
    local archive=$PWD/$VENV/spark-classes.jsa stamp=$VENV/.spark-classes-stamp now
    now=$({ java -version; cat "$VENV/.setup-stamp" scripts/spark_classes.py; } 2>&1 | sha256sum)
    [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$now" ] && return
    say "archiving Spark's classes for quicker starts (once; half a minute)"
    rm -f "$archive"
    "$VENV/bin/python" scripts/spark_classes.py "$archive" >"$VENV/spark-classes.log" 2>&1 ||
        say "that failed (see $VENV/spark-classes.log); Spark starts slower"
    printf '%s\n' "$now" >"$stamp"
}

# Two make commands at once wait for each other.
exec 9<scripts/compile.sh
flock 9

compiling=
for wanted in "$@"; do
    case $wanted in
    # It takes one processor, and runs beside what waits for Java.
    kernels)
        compile_kernels &
        compiling=$!
        ;;
    spark-classes) archive_spark_classes ;;
    *)
        say "unknown word '$wanted'; known: kernels spark-classes"
        exit 1
        ;;
    esac
done
[ -z "$compiling" ] || wait "$compiling"
