#!/usr/bin/env bash
# Makes the environments of the benchmark's competitors: .envs/NAME for every requirements/peers/NAME.txt.
#
#   scripts/peers.sh [NAME...]
#
# An environment has the competitor's own packages, and also sees those of .venv, above all torch: so all are measured
# with one torch. A competitor that cannot be installed here is reported and left out; the others are made all the same.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "peers: $*" >&2; }

base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# The environment depends on the requirements, and on the packages of .venv.
want() { cat "requirements/peers/$1.txt" requirements/torch.txt scripts/peers.sh | sha256sum | cut -c1-64; }

environment() {
        local name=$1 where=.envs/peer-$1 stamp
        stamp=$where/.setup
        [[ -f $stamp && $(<"$stamp") == "$(want "$name")" ]] && return
        say "making $where"
        .venv/bin/python -m venv --clear "$where"
        # Packages of .venv come after the environment's own, and pip counts them as installed.
        printf '%s\n' "$base" >"$("$where/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
        "$where/bin/pip" install -q --disable-pip-version-check --no-build-isolation \
                -c requirements/torch.txt -r "requirements/peers/$name.txt"
        want "$name" >"$stamp"
}

names=("$@")
[[ ${#names[@]} -gt 0 ]] || mapfile -t names < <(basename -s .txt requirements/peers/*.txt)
for name in "${names[@]}"; do
        log=$(mktemp)
        (environment "$name") 2> >(tee "$log" >&2) || say "$name cannot be installed here: $(tail -n 1 "$log")"
        rm -f "$log"
done
