#!/usr/bin/env bash
# pip.sh ENVIRONMENT [ARGUMENTS of pip install] - installs packages into a virtual environment.
#
# uv does it, in a twentieth of pip's processor time, from the indexes that pip's files and variables name. If uv is missing or fails, pip does it. Both are those
# of .venv. An environment with base.pth also sees the packages of .venv. uv does not look there, so what it installs a second time is removed again, and torch is left out.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
environment=$1
shift
unset PYTHONPATH # pip takes packages there for installed ones

with_uv() {
        local uv=$here/.venv/bin/uv base settings value
        settings=$("$here/.venv/bin/pip" --disable-pip-version-check config list)
        # The words of one setting. A variable, which pip lists last, counts before a file.
        setting() { sed -n "s/^[^=]*\.$1='\(.*\)'$/\1/p" <<<"$settings" | tail -n 1 | sed 's/\\n/ /g' | xargs; }
        value=$(setting index-url) && [[ -z $value ]] || export UV_DEFAULT_INDEX=$value
        value=$(setting extra-index-url) && [[ -z $value ]] || export UV_INDEX=$value
        value=$(setting find-links) && [[ -z $value ]] || export UV_FIND_LINKS=${value// /,}
        value=$(setting constraint) && [[ -z $value ]] || export UV_CONSTRAINT=$value
        value=$(setting trusted-host) && [[ -z $value ]] || export UV_INSECURE_HOST=$value
        value=$(setting cert) && [[ -z $value ]] || export SSL_CERT_FILE=$value
        # As pip: of all indexes, the best version.
        export UV_INDEX_STRATEGY=unsafe-best-match UV_HTTP_TIMEOUT=180
        list() { "$uv" pip freeze --quiet --python "$1/bin/python" | grep -E '^[^ ]+==' | grep -v '^torch==' | LC_ALL=C sort; }
        base=$(compgen -G "$environment/lib/python*/site-packages/base.pth") || base=
        if [[ $base ]]; then
                list "$here/.venv" >"$base.same"
                echo torch >"$base.seen"
                set -- --constraints "$base.same" --excludes "$base.seen" "$@"
        fi
        "$uv" pip install --quiet --python "$environment/bin/python" "$@" >&2
        [[ -z $base ]] || list "$environment" | LC_ALL=C comm -12 - "$base.same" | xargs -r "$uv" pip uninstall --quiet --python "$environment/bin/python"
}

if [[ -x $here/.venv/bin/uv ]]; then
        (with_uv "$@") && exit
        echo "setup: uv failed, so pip installs $*" >&2
fi
exec "$here/.venv/bin/pip" --python "$environment/bin/python" install -q --disable-pip-version-check "$@" >&2
