#!/usr/bin/env bash
# Makes this checkout ready to build: system packages and the virtual environment .venv.
#
#   scripts/setup.sh          for the build, the demo and the benchmark
#   scripts/setup.sh test     also for the tests and the linters
#   scripts/setup.sh wheels   only what scripts/wheels.sh needs: no torch, and no libraries of this system
#
# Does nothing, in a few milliseconds, if nothing has changed since the last run. System packages are
# installed when this runs as root, on a terminal after a question; otherwise it prints the command to type and stops.
set -euo pipefail
cd "$(dirname "$0")/.."

purpose=${1:-build}
venv=.venv
python=${PYTHON:-python3}
inputs=(scripts/setup.sh scripts/pip.sh requirements/installers.txt requirements/torch.txt requirements/tools.txt)

say() { printf '%s\n' "setup: $*" >&2; }
stop() { say "$*"; exit 1; }

want() { sha256sum "${inputs[@]}" | sha256sum | cut -c1-64; }

# True if an earlier run for this purpose, or for `test`, which includes it, has ended with the same inputs.
done_before() {
        local stamp
        for stamp in "$venv/.setup-test" "$venv/.setup-$purpose"; do
                [[ -f $stamp && $(<"$stamp") == "$1" ]] && return 0
        done
        return 1
}

missing_packages() {
        local found=()
        command -v cc >/dev/null && command -v make >/dev/null || found+=(build-essential)
        if [[ $purpose == wheels ]]; then # the libraries are compiled from their sources
                command -v pkg-config >/dev/null || found+=(pkg-config)
                command -v perl >/dev/null || found+=(perl)
        elif ! command -v pkg-config >/dev/null; then
                found+=(pkg-config libjansson-dev liburing-dev libssl-dev libcurl4-openssl-dev libcivetweb-dev)
        else
                pkg-config --exists jansson || found+=(libjansson-dev)
                pkg-config --exists liburing || found+=(liburing-dev)
                pkg-config --exists openssl || found+=(libssl-dev)
                pkg-config --exists libcurl || found+=(libcurl4-openssl-dev)
                echo '#include <civetweb.h>' | cc -E -x c - >/dev/null 2>&1 || found+=(libcivetweb-dev)
        fi
        # Debian has these apart from python3 itself.
        "$python" -c 'import ensurepip, venv' 2>/dev/null || found+=(python3-venv)
        [[ -f $("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h ]] || found+=(python3-dev)
        if [[ $purpose == test ]]; then
                pkg-config --exists fuse3 2>/dev/null || found+=(libfuse3-dev) # for tests on file systems that play NFS, or lose power
                if [[ $EUID -eq 0 ]]; then # make power, which mounts; the PATH of other users lacks /usr/sbin
                        command -v mkfs.ext4 >/dev/null || found+=(e2fsprogs)
                        command -v mkfs.xfs >/dev/null || found+=(xfsprogs)
                        command -v mkfs.btrfs >/dev/null || found+=(btrfs-progs)
                fi
                command -v c++ >/dev/null || found+=(g++)  # an example links the library from C++
                command -v dpkg-shlibdeps >/dev/null || found+=(dpkg-dev) # make deb
                command -v gfortran >/dev/null || found+=(gfortran) # examples in Fortran and with MPI
                command -v rustc >/dev/null || found+=(rustc) # the example in Rust
                command -v cmake >/dev/null || found+=(cmake) # the package that CMake finds
                command -v mpicc >/dev/null && command -v mpirun >/dev/null || found+=(libopenmpi-dev openmpi-bin)
                command -v curl >/dev/null || found+=(curl) # sets up the emulator of S3
                command -v unzip >/dev/null || found+=(unzip)
                command -v pdsh >/dev/null || found+=(pdsh) # DeepSpeed's autotuner calls it
                command -v npm >/dev/null || found+=(npm) # installs Azurite
                command -v openssl >/dev/null || found+=(openssl)
                command -v clang >/dev/null || found+=(clang)
                # The run time of sanitizers and fuzzer is a separate package, with the version in its name.
                clang_runtime || found+=("libclang-rt-$(clang_major)-dev")
        fi
        printf '%s\n' "${found[@]}"
}

clang_major() {
        local major
        major=$(clang -dumpversion 2>/dev/null | cut -d. -f1) || true
        # Debian 12's, when clang is about to be installed as well.
        printf '%s' "${major:-14}"
}

clang_runtime() {
        local resources
        resources=$(clang -print-resource-dir 2>/dev/null) || return 1
        compgen -G "$resources/lib/*/libclang_rt.fuzzer*" >/dev/null
}

system_packages() {
        local packages
        mapfile -t packages < <(missing_packages)
        [[ -z ${packages[*]} ]] && return
        command -v apt-get >/dev/null || stop "these are needed, under this system's names for them: ${packages[*]}"
        if [[ $EUID -ne 0 ]]; then
                say "system packages are missing; type this and start again:"
                stop "  sudo apt-get install -y ${packages[*]}"
        fi
        if [[ -t 0 && -t 2 ]]; then
                local answer
                read -rp "setup: install ${packages[*]} with apt-get? [y/N] " answer
                [[ $answer == [yY]* ]] || stop "nothing was installed"
        fi
        say "installing ${packages[*]}"
        apt update -qq
        DEBIAN_FRONTEND=noninteractive apt install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
}

# Another apt may run, for example the one that updates the machine at night. apt-get itself waits for one of its two locks only.
apt() {
        local output try
        for try in {1..60}; do
                output=$(apt-get -o DPkg::Lock::Timeout=600 "$@" 2>&1) && return
                [[ $output == *"Could not get lock"* || $output == *"Unable to acquire"* ]] || break
                [[ $try != 1 ]] || say "waiting for another apt"
                sleep 5
        done
        printf '%s\n' "$output" >&2
        return 1
}

environment() {
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || stop "$python is older than 3.10; set PYTHON"
        if [[ ! -x $venv/bin/python ]]; then
                say "creating $venv"
                "$python" -m venv "$venv" || stop "python's venv module is missing; type: sudo apt-get install -y python3-venv"
        fi
        "$venv/bin/pip" install -q --disable-pip-version-check "$(grep '^pip==' requirements/installers.txt)"
        "$venv/bin/pip" install -q --disable-pip-version-check --only-binary :all: -r requirements/installers.txt || say "uv has no package here, so pip installs all"
        if [[ $purpose == wheels ]]; then
                sed '/^# Testing/,$d' requirements/tools.txt >"$venv/tools.txt"
                scripts/pip.sh "$venv" -r "$venv/tools.txt"
                return
        fi
        local torch
        torch=$(<requirements/torch.txt)
        if ! "$venv/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '${torch#*==}')" 2>/dev/null; then
                say "installing $torch"
                # CPU builds have this suffix on an index that has them. Other indexes have only one build.
                scripts/pip.sh "$venv" "$torch+cpu" 2>/dev/null || scripts/pip.sh "$venv" "$torch"
        fi
        say "installing the tools of requirements/tools.txt"
        scripts/pip.sh "$venv" -r requirements/tools.txt
}

wanted=$(want)
done_before "$wanted" && exit 0
system_packages
environment
printf '%s' "$wanted" >"$venv/.setup-$purpose"
say "ready"
