#!/usr/bin/env bash
# Azurite, the emulator of Azure Storage, for tests.
#
#   scripts/azurite.sh install          installs it into .envs/azurite, unless it is there
#   scripts/azurite.sh run [--table] [--tls] [--two] COMMAND...
#                                       starts an empty one on this machine, runs the command with its
#                                       AZURE_STORAGE_CONNECTION_STRING, and ends it. --table: Table Storage, too.
#                                       --tls: with a certificate, which SSL_CERT_FILE names; the server then accepts
#                                       bearer tokens, too. --two: with a second account, nebulatwo;
#                                       AZURE_STORAGE_KEY has the keys of both
#
# Exit code 77 if npm is missing: the tests that need it are then reported as skipped (TAP).
set -euo pipefail
from=$PWD # where the command runs
cd "$(dirname "$0")/.."

place=.envs/azurite
# This Azurite wants a newer Node than some systems have. It loads Application Insights also if it sends no telemetry, which takes most of its start: an empty
# package stands for that.
packages='{"private": true, "dependencies": {"node": "22", "azurite": "3.37.0"}, "overrides": {"applicationinsights": "file:telemetry"}}'
key='Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==' # of every emulator, and public

install() {
        if ! command -v npm >/dev/null; then
                echo "1..0 # SKIP npm is not here, which installs Azurite"
                exit 77
        fi
        mkdir -p "$place"
        exec 9>"$place/lock"
        flock 9
        [[ -f $place/.ready && $(<"$place/.ready") == "$packages" ]] && return
        echo "setup: installing Azurite" >&2
        rm -rf "$place/node_modules" "$place/package-lock.json"
        mkdir -p "$place/telemetry"
        echo '{"name": "applicationinsights", "version": "2.9.8"}' >"$place/telemetry/package.json"
        echo 'module.exports = {}' >"$place/telemetry/index.js"
        printf '%s' "$packages" >"$place/package.json"
        npm install --prefix "$place" --install-links --no-audit --no-fund --loglevel=error >&2
        printf '%s' "$packages" >"$place/.ready"
}

# Prints a free port. The Table server does not print the port that it chooses, so it gets one.
free_port() {
        "$place/node_modules/.bin/node" -e \
                'const server = require("net").createServer().listen(0, "127.0.0.1", () => { console.log(server.address().port); server.close() })'
}

# Starts one of the emulator's servers, Blob or Table, as `$!`.
start() {
        local name=${1,} port=$2

        : >"$scratch/$name" # it is read before the server may have opened it
        "$place/node_modules/.bin/node" "$place/node_modules/.bin/azurite-$name" --disableTelemetry --inMemoryPersistence \
                --skipApiVersionCheck "--${name}Host" 127.0.0.1 "--${name}Port" "$port" "${options[@]}" >"$scratch/$name" 2>&1 &
        servers+=($!)
}

# Waits until a server prints this text, and prints the rest of that line.
said() {
        local log=$scratch/${1,} i found

        for ((i = 0; i < 600; i++)); do
                found=$(sed -n "s/.*successfully $2 on //p" "$log")
                [[ -n $found ]] && break
                kill -0 "${servers[@]}" 2>/dev/null || break
                sleep 0.1
        done
        [[ -n $found ]] || { cat "$log" >&2; echo "azurite: it does not start" >&2; exit 1; }
        printf '%s' "$found"
}

case ${1:-} in
install)
        install
        ;;
run)
        shift
        install
        exec 9>&- # the lock is for the installation: several emulators may run at once
        scratch=$(mktemp -d)
        options=() servers=() table=
        if [[ ${1:-} == --table ]]; then
                shift
                table=1
        fi
        if [[ ${1:-} == --tls ]]; then
                shift
                openssl req -x509 -newkey rsa:2048 -nodes -keyout "$scratch/key.pem" -out "$scratch/cert.pem" -days 7 -subj /CN=localhost \
                        -addext subjectAltName=DNS:localhost,IP:127.0.0.1 2>/dev/null
                options=(--cert "$scratch/cert.pem" --key "$scratch/key.pem" --oauth basic)
                # Azurite reads the source of a copy from itself.
                export SSL_CERT_FILE=$scratch/cert.pem NODE_EXTRA_CA_CERTS=$scratch/cert.pem
        fi
        if [[ ${1:-} == --two ]]; then
                shift
                export AZURITE_ACCOUNTS="devstoreaccount1:$key;nebulatwo:$key" AZURE_STORAGE_ACCOUNT=devstoreaccount1,nebulatwo AZURE_STORAGE_KEY="$key,$key"
        fi
        trap 'kill -KILL "${servers[@]}" 2>/dev/null || true; wait "${servers[@]}" 2>/dev/null || true; rm -rf "$scratch"' EXIT
        start Blob 0
        if [[ $table ]]; then
                port=$(free_port)
                start Table "$port"
        fi
        blob=$(said Blob listens)
        export AZURE_STORAGE_CONNECTION_STRING="AccountName=devstoreaccount1;AccountKey=$key;BlobEndpoint=$blob/devstoreaccount1"
        if [[ $table ]]; then
                said Table started >/dev/null
                AZURE_STORAGE_CONNECTION_STRING+=";TableEndpoint=${blob%%:*}://127.0.0.1:$port/devstoreaccount1"
        fi
        (cd "$from" && "$@")
        ;;
*)
        sed -n '2,15s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
esac
