#!/usr/bin/env bash
# Debian packages from this checkout: dist/nebula-checkpoint_*.deb with the command and the library, dist/libnebula-dev_*.deb with header and manual.
#
#   scripts/deb.sh                 builds without Python, against the libraries of this system
#   scripts/deb.sh --from ROOT [DIRECTORY]     packs what `meson install --destdir ROOT` has put there with the prefix /usr, to DIRECTORY
#
# dpkg-shlibdeps finds the dependencies of the packages, so a package for another release must be built on that release.
set -euo pipefail
cd "$(dirname "$0")/.."

command -v dpkg-deb >/dev/null && command -v dpkg-shlibdeps >/dev/null || { echo "deb: apt install dpkg-dev brings the tools that are missing" >&2; exit 77; }
[[ -x .venv/bin/meson ]] && PATH=$PWD/.venv/bin:$PATH
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 315532800)}
version=$(sed -n "s/^project('nebula', 'c', version: '\([^']*\)'.*/\1/p" meson.build)
architecture=$(dpkg --print-architecture)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

dist=${3:-dist}
root=$work/root
if [[ ${1:-} == --from ]]; then
        cp -a "$2" "$root"
else
        meson setup "$work/build" --prefix=/usr -Dpython=false -Dwerror=false --buildtype=release >"$work/log" || { tail -20 "$work/log" >&2; exit 1; }
        meson compile -C "$work/build" >"$work/log" || { tail -20 "$work/log" >&2; exit 1; }
        DESTDIR=$root meson install -C "$work/build" --no-rebuild --quiet
fi

# Moves the matching files below the root into a package.
take() {
        local package=$1 pattern path
        shift
        for pattern; do
                for path in "$root"/$pattern; do
                        [[ -e $path || -L $path ]] || { echo "deb: nothing is installed as $pattern" >&2; exit 1; }
                        mkdir -p "$work/$package/$(dirname "${path#"$root"/}")"
                        mv "$path" "$work/$package/$(dirname "${path#"$root"/}")/"
                done
        done
}

# Makes one package: its name, its dependencies, and one sentence. The other fields of control are the same for all.
pack() {
        local package=$1 depends=$2 summary=$3
        install -Dm644 LICENSE "$work/$package/usr/share/doc/$package/copyright"
        mkdir -p "$work/$package/DEBIAN"
        cat >"$work/$package/DEBIAN/control" <<CONTROL
Package: $package
Version: $version
Architecture: $architecture
Maintainer: the Nebula contributors <nebula@localhost>
Section: science
Priority: optional
Installed-Size: $(du -sk "$work/$package/usr" | cut -f1)
Depends: $depends
Description: $summary
 Nebula copies a program's state in memory, lets it go on, and writes the state to
 storage in the background. After a crash it loads the newest complete checkpoint.
CONTROL
        mkdir -p "$dist"
        dpkg-deb --root-owner-group --build "$work/$package" "$dist/${package}_${version}_$architecture.deb"
}

find "$root/usr/share/man" -name '*.[13]' -exec gzip -9n {} +
take nebula-checkpoint usr/bin/nebula "usr/lib/*/libnebula*.so.*" "usr/share/man/man1/*" "usr/share/bash-completion/completions/*" \
        "usr/share/zsh/site-functions/*" "usr/share/fish/vendor_completions.d/*"
take libnebula-dev "usr/include/nebula*" "usr/lib/*/libnebula*.so" "usr/lib/*/pkgconfig/nebula.pc" "usr/lib/*/cmake/nebula" "usr/share/man/man3/*"
strip --strip-unneeded "$work"/nebula-checkpoint/usr/bin/nebula "$work"/nebula-checkpoint/usr/lib/*/libnebula*.so.*.*

# dpkg-shlibdeps wants a source package around it.
mkdir -p "$work/source/debian"
printf 'Source: nebula-checkpoint\n\nPackage: nebula-checkpoint\nArchitecture: any\n' >"$work/source/debian/control"
libraries=$(cd "$work/source" && dpkg-shlibdeps -O --ignore-missing-info "$work/nebula-checkpoint/usr/bin/nebula" \
        "$work"/nebula-checkpoint/usr/lib/*/libnebula*.so.*.* 2>/dev/null | sed -n 's/^shlibs:Depends=//p')
pack nebula-checkpoint "${libraries:-libc6}" "checkpoints that cost almost nothing: command, agent and library"
pack libnebula-dev "nebula-checkpoint (= $version)" "checkpoints that cost almost nothing: header, link and manual of libnebula"
