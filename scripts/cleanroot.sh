#!/usr/bin/env bash
# Tries the wheels of dist/ on a system that has Python and nothing else: install, doctor, save, SIGKILL, resume.
#
#   scripts/cleanroot.sh [bookworm] [trixie]     releases of Debian; bookworm if none is named
#
# Needs root and debootstrap. The systems are kept in build-wheels/roots/. The pip of .venv downloads torch and its dependencies
# (the CPU build, if the index has one), so that nothing inside the root needs a network. NEBULA_DEBIAN_MIRROR names another mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
top=$PWD
kept=$top/build-wheels
mirror=${NEBULA_DEBIAN_MIRROR:-http://deb.debian.org/debian}
torch=$(<requirements/torch.txt)
# pip takes each platform literally: manylinux_2_28 does not include the older ones.
platforms=(--platform manylinux2014_x86_64)
for minor in {17..28}; do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done

say() { printf '%s\n' "cleanroot: $*" >&2; }
[[ $EUID -eq 0 ]] || { say "needs root"; exit 1; }
command -v debootstrap >/dev/null || { say "needs debootstrap; type: apt-get install -y debootstrap"; exit 1; }

mounted=()
leave() {
        local place
        for place in "${mounted[@]}"; do umount "$place"; done
        mounted=()
}
trap leave EXIT

for release in "${@:-bookworm}"; do
        root=$kept/roots/$release
        if [[ ! -x $root/usr/bin/python3 ]]; then
                say "$release: installing a base system"
                rm -rf "$root"
                mkdir -p "$root"
                debootstrap --variant=minbase --include=python3,python3-venv "$release" "$root" "$mirror" >"$kept/roots/$release.log" 2>&1 ||
                        { tail -20 "$kept/roots/$release.log" >&2; exit 1; }
        fi
        for library in libssl.so libjansson.so liburing.so libcurl.so; do
                [[ -z $(find "$root/usr/lib" -name "$library.*" | grep -v libssl) ]] || { say "$release has $library: it shows nothing of a wheel"; exit 1; }
        done
        version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        wheel=$(ls dist/nebula_checkpoint-*-"cp${version/./}"-*_x86_64.whl)
        mkdir -p "$kept/deps-$version" "$root/wheels"
        for choice in "$torch+cpu" "$torch"; do
                .venv/bin/pip download -q --disable-pip-version-check --only-binary :all: --python-version "$version" --implementation cp \
                        "${platforms[@]}" -d "$kept/deps-$version" "$choice" numpy >"$kept/roots/$release.log" 2>&1 && break
        done
        compgen -G "$kept/deps-$version/torch-*.whl" >/dev/null ||
                { grep ERROR "$kept/roots/$release.log" >&2 || true; say "$release: the index has no $torch for Python $version"; exit 1; }
        rm -rf "$root/wheels" "$root/try" "$root/storage"
        mkdir -p "$root/wheels" "$root/try" "$root/storage"
        cp -l "$kept/deps-$version"/*.whl "$wheel" "$root/wheels/"
        cp tests/cleanroot.py "$root/try/"
        mount --bind /proc "$root/proc" && mounted=("$root/proc" "${mounted[@]}")
        mount -t tmpfs -o size=${SHM:-512m} tmpfs "$root/dev/shm" && mounted=("$root/dev/shm" "${mounted[@]}")
        say "$release: Python $version, $(basename "$wheel")"
        chroot "$root" /usr/bin/env -i PATH=/usr/bin:/bin HOME=/root sh -ec '
                python3 -m venv /try/env
                /try/env/bin/pip install -q --disable-pip-version-check --no-index --find-links /wheels "nebula-checkpoint[torch]"
                /try/env/bin/nebula doctor --path /storage || test $? = 1
                /try/env/bin/python /try/cleanroot.py /storage'
        leave
        say "$release: ok"
done
