# For scripts that try an installation, which source it: the folder $work and an agent of their own, both gone at the end, and programs that resume.
# shellcheck shell=bash
script=$(basename "$0" .sh)
work=$(mktemp -d)
export NEBULA_RUNTIME_DIR=$work/run NEBULA_MEMORY_DIR=$work/memory
mkdir -m 700 "$NEBULA_RUNTIME_DIR" "$NEBULA_MEMORY_DIR"
trap 'nebula stop --now --yes >/dev/null 2>&1 || true; rm -rf "$work"' EXIT

# Runs a program to its end; kills another run, continues it, and expects the same end.
try() { # NAME OPTIONS_TO_CRASH PROGRAM...
        local name=$1 crash=$2 store=$work/stores/$1 whole resumed
        shift 2
        whole=$("$@" "$store" | tail -n 1)
        # shellcheck disable=SC2086
        ! { "$@" "$store-killed" $crash >"$work/log"; } 2>/dev/null || { echo "$script: $name was not killed" >&2; exit 1; }
        resumed=$("$@" "$store-killed")
        [[ $resumed == resuming* && ${resumed##*$'\n'} == "$whole" ]] || { printf '%s: %s says %s, not %s\n' "$script" "$name" "$resumed" "$whole" >&2; exit 1; }
        echo "$script: $name resumed after a kill: $whole"
}

# The program of C finds the library by pkg-config.
try_heat() {
        # shellcheck disable=SC2046
        cc -O2 examples/heat.c $(pkg-config --cflags --libs nebula) "-Wl,-rpath,$(pkg-config --variable=libdir nebula)" -o "$work/heat"
        try heat "--crash-at 750" "$work/heat" --path
}
