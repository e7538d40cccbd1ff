#!/usr/bin/env bash
# moto, a server that behaves like Amazon S3, for tests.
#
#   scripts/moto.sh install          installs it into .envs/moto, unless it is there
#   scripts/moto.sh run COMMAND...   starts an empty one on this machine, with the buckets "nebula" and "nebula2" and a user who may use them, runs the
#                                    command with AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of that user, and ends it
#
# With these options moto checks signatures, but not the checksums of bodies. It checks a condition and writes in two steps, so it
# serves one request after the other here.
set -euo pipefail
from=$PWD # where the command runs
cd "$(dirname "$0")/.."

place=.envs/moto

# Sends a request of AWS's query protocol, as a user that needs no rights yet.
ask() {
        local service=$1
        shift
        curl -sS --fail-with-body --noproxy '*' --aws-sigv4 "aws:amz:us-east-1:$service" --user setup:setup "$@"
}

case ${1:-} in
install)
        scripts/venv.sh $place requirements/stores/moto.txt
        ;;
run)
        shift
        scripts/venv.sh $place requirements/stores/moto.txt
        scratch=$(mktemp -d)
        log=$scratch/log
        : >"$log" # sed reads it before the server may have opened it
        # moto checks signatures and rights after this number of requests: the requests of this script.
        INITIAL_NO_AUTH_ACTION_COUNT=5 "$place/bin/python" - >"$log" 2>&1 <<'END' &
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

run_simple("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), request_handler=MotoRequestHandler)
END
        server=$!
        trap 'kill $server 2>/dev/null || true; wait $server 2>/dev/null || true; rm -rf "$scratch"' EXIT
        for ((i = 0; i < 600; i++)); do
                endpoint=$(sed -n 's/.*Running on \(http:[^ ]*\).*/\1/p' "$log")
                [[ -n $endpoint ]] && break
                kill -0 $server 2>/dev/null || break
                sleep 0.1
        done
        [[ -n $endpoint ]] || { cat "$log" >&2; echo "moto: it does not start" >&2; exit 1; }
        rights='{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
        ask iam "$endpoint/" -d Action=CreateUser -d UserName=nebula -d Version=2010-05-08 >"$scratch/answer"
        ask iam "$endpoint/" -d Action=PutUserPolicy -d UserName=nebula -d PolicyName=all --data-urlencode "PolicyDocument=$rights" \
                -d Version=2010-05-08 >"$scratch/answer"
        ask s3 -X PUT "$endpoint/nebula" >"$scratch/answer"
        ask s3 -X PUT "$endpoint/nebula2" >"$scratch/answer"
        ask iam "$endpoint/" -d Action=CreateAccessKey -d UserName=nebula -d Version=2010-05-08 >"$scratch/answer"
        unset "${!AWS_@}"
        AWS_ACCESS_KEY_ID=$(sed -n 's:.*<AccessKeyId>\(.*\)</AccessKeyId>.*:\1:p' "$scratch/answer")
        AWS_SECRET_ACCESS_KEY=$(sed -n 's:.*<SecretAccessKey>\(.*\)</SecretAccessKey>.*:\1:p' "$scratch/answer")
        export AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_ENDPOINT_URL=$endpoint AWS_REGION=us-east-1
        (cd "$from" && "$@")
        ;;
*)
        sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
