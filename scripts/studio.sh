#!/usr/bin/env bash
# Makes .envs/studio: the packages that `nebula studio` needs, and a browser for its tests and pictures.
#
#   scripts/studio.sh             Starlette and uvicorn
#   scripts/studio.sh browser     and playwright with Debian's Chromium
#
# The environment also sees the packages of .venv, among them torch and nebulaml. Exit code 77: this machine has no Chromium, and none can be installed.
set -euo pipefail
cd "$(dirname "$0")/.."

environment=.envs/studio
list=requirements/studio.txt
mkdir -p .envs
exec 9>.envs/studio.lock
flock 9
if [[ ! -f $environment/.ready || $list -nt $environment/.ready ]]; then
        echo "setup: making $environment" >&2
        shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        .venv/bin/python -m venv --without-pip "$environment"
        printf '%s\n' "$shared" >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
        scripts/pip.sh "$environment" -r "$list"
        touch "$environment/.ready"
fi
[[ ${1:-} == browser ]] || exit 0
axe=axe-core@4.10.3 # the accessibility check of the page's tests; without npm that test is skipped
if [[ ! -f $environment/axe/$axe ]] && command -v npm >/dev/null; then
        npm install --silent --no-audit --no-fund --prefix "$environment/axe" "$axe" >/dev/null && touch "$environment/axe/$axe"
fi
command -v chromium >/dev/null && exit 0
if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
        echo "setup: a browser is missing; type: sudo apt-get install -y chromium" >&2
        exit 77
fi
echo "setup: installing chromium" >&2
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
