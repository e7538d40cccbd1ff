#!/usr/bin/env bash
# The Python half of `make test`, after build and install: tests.sh FRAMEWORK-TESTS [ARGUMENTS of pytest].
#
# Three pytest processes run side by side, since most tests wait for a process, a disk or a clock. The output of the first half of tests/python
# appears while it runs, that of the others when they have ended. The second half runs after the frameworks' tests, and the studio's after it. The
# last lines name the tests that failed, and say how many passed in all.
set -euo pipefail
cd "$(dirname "$0")/.."
chosen=$1
shift
log=$(mktemp -d)
# With the oldest torch: what depends most on torch itself. `make test-oldest` runs the others.
oldest=.envs/$(basename -s .txt requirements/frameworks/torch-*.txt)/bin/python
old_tests=(tests/python/test_{dcp_paths,dense,load_into,values}.py)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$log"' EXIT

run() {
        ${python:-.venv/bin/python} -m pytest --timeout=300 -rsfE --no-header "$@" 2>&1 || [ $? = 5 ] # 5: the arguments chose none of them
}

(bad=; run tests/model tests/frameworks -k "$chosen" "$@" || bad=1; run tests/python/test_[m-z]*.py "$@" || bad=1; python=.envs/studio/bin/python run tests/studio "$@" || bad=1; [ -z "$bad" ]) >"$log/frameworks" &
frameworks=$!
(bad=; run tests/integration "$@" || bad=1; python=$oldest run "${old_tests[@]}" "$@" || bad=1; [ -z "$bad" ]) >"$log/integration" &
integration=$!
failed=
run tests/python --ignore-glob='*/test_[m-z]*.py' "$@" | tee "$log/python" || failed=1
wait "$integration" || failed=1
wait "$frameworks" || failed=1
cat "$log/integration" "$log/frameworks"
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
