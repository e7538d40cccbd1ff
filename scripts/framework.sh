#!/usr/bin/env bash
# Makes a framework's own environment, .envs/NAME, from requirements/frameworks/NAME.txt.
#
#   scripts/framework.sh deepspeed-0.19.6
#   scripts/framework.sh newest-lightning    the same packages without their versions: the newest of all, for scripts/newest.sh
#
# The environment also sees the packages of .venv, so that every framework is tested with the same build of torch and nebulaml.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
list=requirements/frameworks/$name.txt
[[ -f $list ]] || list=requirements/suites/$name.txt
environment=.envs/$name
if [[ $name == newest-* ]]; then
        mkdir -p .envs
        sed -E 's/^((# alone: )?[A-Za-z][^=]*)==.*/\1/' "requirements/frameworks/${name#newest-}.txt" >"$environment.txt.new"
        list=$environment.txt
        cmp -s "$list.new" "$list" && rm "$list.new" || mv "$list.new" "$list"
fi
[[ -f $list ]] || { printf 'no environment %s; there are:\n%s\n' "$name" "$(cd requirements/frameworks && ls | sed 's/\.txt$//')" >&2; exit 2; }

# A line "# python: 3.12" names another Python than that of .venv. Its environment has a torch and a build of nebulaml of its own.
own=$(sed -n 's/^# python: //p' "$list")
install() { scripts/pip.sh "$environment" "$@"; }
nebulaml() { .venv/bin/pip --python "$environment/bin/python" install -q --disable-pip-version-check --no-build-isolation --no-deps --force-reinstall --config-settings=build-dir="build/python-$own" --config-settings=setup-args=-Dwerror=false .; }

if [[ -f $environment/.ready && $environment/.ready -nt $list ]]; then
        [[ -z $own ]] || { nebulaml; touch "$environment/.ready"; }
        exit 0
fi
printf 'setup: making %s\n' "$environment" >&2
if [[ -n $own ]]; then
        # pyenv has its versions out of the way, until this variable names one.
        PYENV_VERSION=$own "python$own" -c '' 2>/dev/null || { echo "setup: $environment needs Python $own; its tests are skipped" >&2; exit 0; }
        PYENV_VERSION=$own "python$own" -m venv --without-pip "$environment"
        mapfile -t tools < <(grep -E '^(meson|meson-python|ninja|numpy)==' requirements/tools.txt)
        install "${tools[@]}" filelock fsspec jinja2 networkx setuptools sympy typing_extensions
        torch=$(<requirements/torch.txt)
        install --no-deps "$torch+cpu" 2>/dev/null || { install --no-deps "$torch" && .venv/bin/python scripts/without_cuda.py "$environment"; }
        nebulaml
else
        shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        .venv/bin/python -m venv --without-pip "$environment" # pip is one of .venv's packages
        printf '%s\n' "$shared" >"$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
fi
# DeepSpeed is built from source and imports torch during the build: so the build is not isolated, and its tools are installed here.
export DS_ACCELERATOR=cpu
install setuptools wheel
install --no-build-isolation -r "$list"
# A line "# alone: PACKAGE" installs a package without its requirements, if they conflict with others.
mapfile -t alone < <(sed -n 's/^# alone: //p' "$list")
[[ ${#alone[@]} -eq 0 ]] || install --no-deps "${alone[@]}"
[[ $name != torch-* ]] || .venv/bin/python scripts/without_cuda.py "$environment"
touch "$environment/.ready"
