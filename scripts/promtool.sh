#!/usr/bin/env bash
# promtool, which checks alert rules and metrics of Prometheus, for tests: prints where it is.
#
# It comes from the system's package, unpacked into .envs/promtool: nothing is installed and no service starts. Exit code 77 if the package is not available.
set -euo pipefail
cd "$(dirname "$0")/.."

place=.envs/promtool
if found=$(command -v promtool); then
        echo "$found"
        exit
fi
mkdir -p "$place"
exec 9>"$place/lock"
flock 9
if [[ ! -x $place/usr/bin/promtool ]]; then
        command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "there is no apt-get, which brings promtool" >&2; exit 77; }
        (cd "$place" && apt-get download -qq prometheus >&2) || { echo "there is no package prometheus, which has promtool" >&2; exit 77; }
        dpkg -x "$place"/prometheus_*.deb "$place"
        rm -f "$place"/prometheus_*.deb
fi
echo "$PWD/$place/usr/bin/promtool"
