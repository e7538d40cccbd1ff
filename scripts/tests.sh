#!/usr/bin/env bash
# The Python half of `make test`, after build and install: tests.sh FRAMEWORK-TESTS [ARGUMENTS of pytest].
#
# Four parts run side by side, since most tests wait for a process, a disk or a clock. The output of the first one appears while it runs, that of
# the others when they have ended. The last lines name the tests that failed, and say how many passed in all.
set -euo pipefail
cd "$(dirname "$0")/.."
chosen=$1
shift
log=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$log"' EXIT

run() {
        ${python:-.venv/bin/python} -m pytest --timeout=300 -rsfE --no-header "$@" 2>&1 || [ $? = 5 ] # 5: the arguments chose none of them
}

# Runs a part's commands, all of them, and fails if one has failed.
part() {
        local command bad=
        for command; do
                eval "$command" || bad=1
        done
        [ -z "$bad" ]
}

parts=()
# in_background NAME COMMAND...
in_background() {
        part "${@:2}" >"$log/$1" &
        parts+=($!)
}

arguments=${*@Q}
in_background frameworks "run tests/model tests/frameworks -k ${chosen@Q} $arguments" \
        "run tests/integration/test_elastic_nodes.py tests/integration/test_re[ps]*.py $arguments"
in_background integration "run tests/integration --ignore=tests/integration/test_elastic_nodes.py --ignore-glob='*/test_re[ps]*.py' --ignore-glob='*/test_[s-z]*.py' $arguments"
in_background python-m-z "run tests/python/test_[m-z]*.py $arguments" \
        "run tests/integration/test_[s-z]*.py $arguments" "python=.envs/studio/bin/python run tests/studio $arguments"
failed=
part "run tests/python --ignore-glob='*/test_[m-z]*.py' $arguments" | tee "$log/python" || failed=1
for one in "${parts[@]}"; do
        wait "$one" || failed=1
done
cat "$log"/{python-m-z,integration,frameworks}
grep -hE '^(FAILED|ERROR) ' "$log"/* || true
awk '/ in [0-9.]+s/ && /=====/ {
        for (i = 2; i <= NF; i++)
                if ($i ~ /^(passed|failed|error|errors|skipped),?$/) { sub(/,$/, "", $i); sum[$i] += $(i - 1) }
} END {
        printf "== %d passed", sum["passed"]
        for (word in sum)
                if (word != "passed") printf ", %d %s", sum[word], word
        print " =="
}' "$log"/*
[ -z "$failed" ]
