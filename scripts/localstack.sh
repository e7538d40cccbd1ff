#!/usr/bin/env bash
# LocalStack, a server that behaves like Amazon S3, for tests. This version needs no account.
#
#   scripts/localstack.sh install          installs it into .envs/localstack, unless it is there
#   scripts/localstack.sh run COMMAND...   starts an empty one on this machine, with the buckets "nebula" and "nebula2", runs the command with
#                                          AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and ends it
#
# It compares the CRC64NVME of parts and of whole objects, which moto does not. It does not check signatures, which moto does.
set -euo pipefail
from=$PWD # where the command runs
cd "$(dirname "$0")/.."

place=.envs/localstack

# Prints a free port: the server does not print the port that it chooses.
free_port() {
        "$place/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

make_bucket() {
        curl -sS --fail --noproxy '*' -X PUT "$AWS_ENDPOINT_URL/$1" >"$scratch/answer" 2>&1
}

case ${1:-} in
install)
        scripts/venv.sh $place requirements/stores/localstack.txt
        ;;
run)
        shift
        scripts/venv.sh $place requirements/stores/localstack.txt
        scratch=$(mktemp -d)
        unset "${!AWS_@}"
        export AWS_ENDPOINT_URL=http://127.0.0.1:$(free_port)
        # The server has packages of its own, writes below these directories, and asks nothing of other machines.
        env -u PYTHONPATH HOME="$scratch" XDG_CACHE_HOME="$scratch" TMPDIR="$scratch" SERVICES=s3 STRICT_SERVICE_LOADING=1 EAGER_SERVICE_LOADING=1 \
                DISABLE_EVENTS=1 SKIP_SSL_CERT_DOWNLOAD=1 DNS_ADDRESS=0 GATEWAY_LISTEN="${AWS_ENDPOINT_URL#http://}" \
                "$place/bin/python" -m localstack.runtime.main >"$scratch/log" 2>&1 &
        server=$!
        trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$scratch"' EXIT
        for ((i = 0; i < 1800; i++)); do
                make_bucket nebula && break
                kill -0 $server 2>/dev/null || break
                sleep 0.1
        done
        make_bucket nebula2 || { cat "$scratch/log" >&2; echo "localstack: it does not start" >&2; exit 1; }
        export AWS_ACCESS_KEY_ID=test AWS_SECRET_ACCESS_KEY=localstack-test AWS_REGION=us-east-1
        (cd "$from" && "$@")
        ;;
*)
        sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
