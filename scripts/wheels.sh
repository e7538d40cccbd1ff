#!/usr/bin/env bash
# Builds wheels for other machines than this one: dist/*.whl, one for each CPython of requirements/wheels/pythons.txt.
#
#   scripts/wheels.sh [x86_64] [aarch64]      this machine's architecture if none is named
#
# Everything is compiled against glibc 2.28 (manylinux_2_28) with zig's C compiler. The agent has its libraries linked in
# statically; they are built once and kept in build-wheels/. The trainer's half needs libc only, and scripts/wheels.py checks that.
# NEBULA_DEBIAN_MIRROR and NEBULA_UBUNTU_MIRROR name other mirrors to fetch from.
set -euo pipefail
cd "$(dirname "$0")/.."

top=$PWD
kept=$top/build-wheels
python=$top/.venv/bin/python
export PATH=$top/.venv/bin:$PATH ZIG_GLOBAL_CACHE_DIR=$kept/zig-cache
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 315532800)
export SOURCE_DATE_EPOCH
jobs=$(nproc)

say() { printf '%s\n' "wheels: $*" >&2; }

# Does a step whose result is kept. Shows its output if it fails.
once() {
        local stamp=$kept/$arch/.$1 want
        want=$({ grep "^$1 " requirements/wheels/sources.txt; cat requirements/wheels/tools.txt; declare -f "build_$1" unpack wrappers; } | sha256sum)
        [[ -f $stamp && $(<"$stamp") == "$want" ]] && return
        say "$arch: $1"
        "build_$1" >"$kept/$arch/$1.log" 2>&1 & # not behind ||, where a failed command would be passed over
        wait $! || { tail -40 "$kept/$arch/$1.log" >&2; exit 1; }
        printf '%s' "$want" >"$stamp"
}

compiler() {
        if ! grep -qsx "$(<requirements/wheels/tools.txt)" "$kept/tools/.done"; then
                say "installing zig"
                rm -rf "$kept/tools"
                "$top/.venv/bin/pip" install -q --disable-pip-version-check --target "$kept/tools" -r requirements/wheels/tools.txt
                cp requirements/wheels/tools.txt "$kept/tools/.done"
        fi
}

# By default, zig's code stops at undefined behaviour. The builds with sanitizers check for that instead.
wrappers() {
        local zig=$kept/tools/ziglang/zig tool
        mkdir -p "$kept/$arch"
        for tool in cc ar ranlib; do
                printf '#!/bin/sh\nexec %s %s %s "$@"\n' "$zig" "$tool" \
                        "$([[ $tool != cc ]] || echo "-target $arch-linux-gnu.2.28 -fno-sanitize=undefined")" >"$kept/$arch/$tool"
                chmod +x "$kept/$arch/$tool"
        done
}

unpack() {
        rm -rf "${kept:?}/$arch/$1"
        mkdir -p "$kept/$arch/$1"
        tar -xf "$("$python" scripts/wheels.py fetch "$1")" -C "$kept/$arch/$1" --strip-components=1
        cd "$kept/$arch/$1"
}

# The compiler is called by its name, not by its path: OpenSSL keeps the command in the library, and a wheel must not name a build directory.
tools() { env PATH="$kept/$arch:$PATH" CC=cc AR=ar RANLIB=ranlib "$@"; }

# TLS 1.2 and 1.3 as peers and stores use them, and nothing older. /etc/ssl is only the last place for certificates (src/store/http).
build_openssl() {
        unpack openssl
        tools ./Configure "linux-$arch" --prefix=/ --libdir=lib --openssldir=/etc/ssl -O2 no-shared no-module no-apps no-tests no-docs no-engine \
                no-legacy no-quic no-dtls no-srp no-srtp no-comp no-cms no-cmp no-ts no-ct no-rfc3779 no-gost no-sm2 no-sm3 no-sm4 \
                no-aria no-camellia no-seed no-idea no-bf no-cast no-rc2 no-rc4 no-mdc2 no-whirlpool no-rmd160 no-md4 no-blake2 \
                no-siphash no-scrypt no-argon2 no-dsa no-ec2m no-ml-dsa no-slh-dsa no-async no-dso no-makedepend no-nextprotoneg \
                no-ui-console no-http
        tools make -j"$jobs" build_libs
        tools make install_dev DESTDIR="$kept/$arch/root"
}

build_curl() {
        unpack curl
        tools PKG_CONFIG_LIBDIR="$kept/$arch/root/lib/pkgconfig" PKG_CONFIG_SYSROOT_DIR="$kept/$arch/root" ./configure -q --host="$arch-linux-gnu" \
                --prefix=/ --disable-shared --enable-static --with-openssl --without-ca-bundle --without-ca-path --without-libpsl \
                --without-zlib --without-brotli --without-zstd --without-nghttp2 --without-libidn2 --without-libssh2 --without-librtmp \
                --disable-ftp --disable-file --disable-ldap --disable-ldaps --disable-rtsp --disable-dict --disable-telnet --disable-tftp \
                --disable-pop3 --disable-imap --disable-smb --disable-smtp --disable-gopher --disable-mqtt --disable-ipfs --disable-manual \
                --disable-docs --disable-ntlm --disable-tls-srp --disable-unix-sockets --disable-websockets --disable-netrc --disable-alt-svc \
                --enable-threaded-resolver CFLAGS=-O2
        tools make -j"$jobs" -C lib
        tools make -C lib install DESTDIR="$kept/$arch/root"
        make -C include install DESTDIR="$kept/$arch/root"
        make install-pkgconfigDATA DESTDIR="$kept/$arch/root"
}

build_jansson() {
        unpack jansson
        local root=$kept/$arch/root has=()
        for one in ENDIAN_H FCNTL_H SCHED_H UNISTD_H SYS_PARAM_H SYS_STAT_H SYS_TIME_H SYS_TYPES_H STDINT_H CLOSE GETPID GETTIMEOFDAY OPEN READ \
                SCHED_YIELD SYNC_BUILTINS ATOMIC_BUILTINS LOCALE_H SETLOCALE; do
                has+=("-DHAVE_$one=1")
        done
        sed -e 's/@json_inline@/inline/; s/@json_have_[a-z_]*@/1/' src/jansson_config.h.in >src/jansson_config.h
        ! grep '@json_' src/jansson_config.h || return 1
        cd src
        "$kept/$arch/cc" -O2 -fPIC -c -I. "${has[@]}" -DUSE_URANDOM=1 -DUSE_DTOA=1 -DDTOA_ENABLED=1 -DINITIAL_HASHTABLE_ORDER=3 ./*.c
        rm -f libjansson.a
        "$kept/$arch/ar" rcs libjansson.a ./*.o
        install -D -m 644 -t "$root/lib" libjansson.a
        install -D -m 644 -t "$root/include" jansson.h jansson_config.h
        described jansson
}

build_liburing() {
        unpack liburing
        # The prefix is the target directory itself. Otherwise an install that ignored one of the names below would write to this system.
        ./configure --prefix="$kept/$arch/root" --cc="$kept/$arch/cc" --cxx="$kept/$arch/cc" --use-libc
        make -C src CC="$kept/$arch/cc" AR="$kept/$arch/ar" RANLIB="$kept/$arch/ranlib" ENABLE_SHARED=0 CFLAGS='-O2 -fPIC'
        # This makefile has no DESTDIR; the makefile above it adds it to the names.
        make -C src install ENABLE_SHARED=0 prefix="$kept/$arch/root" libdir="$kept/$arch/root/lib" libdevdir="$kept/$arch/root/lib" \
                includedir="$kept/$arch/root/include"
        described liburing
        sed -i 's/-lliburing/-luring/' "$kept/$arch/root/lib/pkgconfig/liburing.pc"
}

# HTTP alone: no TLS, no files, no scripts. Its date would make two builds differ.
build_civetweb() {
        unpack civetweb
        "$kept/$arch/cc" -O2 -fPIC -c src/civetweb.c -Iinclude -DNO_SSL -DNO_CGI -DNO_FILES -DNO_CACHING -DUSE_IPV6 \
                -Wno-builtin-macro-redefined -D__DATE__='""'
        rm -f libcivetweb.a
        "$kept/$arch/ar" rcs libcivetweb.a civetweb.o
        install -D -m 644 -t "$kept/$arch/root/lib" libcivetweb.a
        install -D -m 644 -t "$kept/$arch/root/include" include/civetweb.h
        described civetweb
}

# A pkg-config file for a library whose own build was not used.
described() {
        mkdir -p "$kept/$arch/root/lib/pkgconfig"
        printf 'prefix=/\nName: %s\nDescription: %s\nVersion: %s\nLibs: -L${prefix}lib -l%s\nCflags: -I${prefix}include\n' \
                "$1" "$1" "$(awk -v name="$1" '$1 == name { print $2 }' "$top/requirements/wheels/sources.txt")" "$1" \
                >"$kept/$arch/root/lib/pkgconfig/$1.pc"
}

machine_file() {
        cat >"$kept/$arch/machine.ini" <<END
[binaries]
c = '$kept/$arch/cc'
ar = '$kept/$arch/ar'
strip = 'true'
pkg-config = 'pkg-config'
python = '$python'
[properties]
pkg_config_libdir = '$kept/$arch/root/lib/pkgconfig'
sys_root = '$kept/$arch/root'
[host_machine]
system = 'linux'
cpu_family = '$arch'
cpu = '$arch'
endian = 'little'
END
}

engine() {
        local build=$kept/$arch/nebula headers
        headers=$("$python" scripts/wheels.py headers)
        say "$arch: nebula"
        machine_file
        rm -rf "$build"
        {
                meson setup "$build" --cross-file "$kept/$arch/machine.ini" --prefix=/ -Dwheel=true -Dpython=true -Dpython_headers="$headers" \
                        -Dtests=false -Dio_uring=enabled -Dmetrics_server=enabled -Dbuildtype=release -Doptimization=2 -Dc_link_args=-Wl,-S \
                        -Dwerror=false && ninja -C "$build" --quiet
        } >"$kept/$arch/nebula.log" 2>&1 || { grep -A 5 -E 'error|ERROR|FAILED' "$kept/$arch/nebula.log" >&2; exit 1; }
        if grep -qE '^ LINK_ARGS = .* /usr/lib/[^ ]*[.]a' "$build/build.ninja"; then
                say "a library of this system is linked in: see $build/build.ninja"
                exit 1
        fi
        rm -rf "$kept/$arch/stage"
        DESTDIR=$kept/$arch/stage meson install -C "$build" --quiet --no-rebuild
}

mkdir -p "$kept/sources" dist
compiler
for arch in "${@:-$(uname -m)}"; do
        [[ $arch == x86_64 || $arch == aarch64 ]] || { say "$arch: one of x86_64 and aarch64"; exit 2; }
        wrappers
        for library in openssl curl jansson liburing civetweb; do once $library; done
        engine
        "$python" scripts/wheels.py assemble "$arch" --stage "$kept/$arch/stage" --sources "$kept/$arch" --out dist
done
