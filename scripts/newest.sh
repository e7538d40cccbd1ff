#!/usr/bin/env bash
# Tries the newest versions of the frameworks that the package registry has, and says what broke. For a weekly job: each time it makes the environments anew.
#
#   scripts/newest.sh                 all of them
#   scripts/newest.sh hf lightning    these
#
# The last lines are a table: the versions that `make test-frameworks` runs, the newest, and how many tests passed and failed. The exit code is 1 if
# an environment could not be made or a test failed.
set -euo pipefail
cd "$(dirname "$0")/.."
declare -A tests=(
        [lightning]="lightning lightning_sharded" [hf]="hf accelerate" [trl]=trl [deepspeed-0.19.8]=deepspeed [jax]=jax [ray]=ray [torchtitan]=torchtitan
        [verl]=verl [trackers]=trackers [torchdata]=elastic_data [hdf5]=hdf5
)
[[ $# -gt 0 ]] || set -- "${!tests[@]}"
table=$(mktemp) log=$(mktemp)
trap 'rm -f "$table" "$log"' EXIT
bad=
for name; do
        [[ -n ${tests[$name]:-} ]] || { printf 'newest: no environment %s; there are: %s\n' "$name" "${!tests[*]}" >&2; exit 2; }
        rm -rf ".envs/newest-$name"
        list=$(sed -nE 's/^(# alone: )?([A-Za-z][^=[]*)(\[.*\])?==(.*)/\2 \4/p' "requirements/frameworks/$name.txt")
        if ! scripts/framework.sh "newest-$name"; then
                printf '%s: no environment could be made\n' "$name" >>"$table"
                bad=1
                continue
        fi
        found=$(while read -r package version; do
                now=$(".envs/newest-$name/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$package")
                [[ $now == "$version" ]] && printf '%s %s, ' "$package" "$version" || printf '%s %s -> %s, ' "$package" "$version" "$now"
        done <<<"$list")
        chosen=()
        for file in ${tests[$name]}; do chosen+=("tests/frameworks/test_$file.py"); done
        NEBULA_TEST_NEWEST=1 .venv/bin/python -m pytest --timeout=600 -rfE --no-header "${chosen[@]}" >"$log" 2>&1 || { bad=1; grep -E '^(FAILED|ERROR) ' "$log" || tail -20 "$log"; }
        printf '%s: %s: %s\n' "$name" "${found%, }" "$(tail -1 "$log" | tr -d =)" >>"$table"
done
cat "$table"
[[ -z $bad ]]
