#!/usr/bin/env bash
# Runs the linters, and checks the rules of this project that a search can check. Prints nothing if all is well.
set -euo pipefail
cd "$(dirname "$0")/.."
failed=0

complain() { printf '%s\n' "$@" >&2; failed=1; }

# Only src/os makes system calls, so only it includes headers that declare them. <sys/auxv.h> declares none: it describes the processor.
system='^ *# *include *<(unistd|fcntl|dirent|poll|spawn|mntent|sys/[a-z_]+|linux/[a-z_]+|liburing)\.h>'
if found=$(grep -nE "$system" -r src --include='*.c' --include='*.h' | grep -v '^src/os/\|^src/sum/cpu.c:.*<sys/auxv.h>'); then
        complain "lint: system headers outside src/os:" "$found"
fi

# The trainer's half does not depend on storage, the agent and their libraries.
theirs='^ *# *include *["<](store/|agent/|cli/|jansson|liburing|openssl/|curl/)'
if found=$(grep -nE "$theirs" -r src/base src/sum src/os src/image src/ipc src/capture src/client \
        --include='*.c' --include='*.h' | grep -v '^src/os/os_uring'); then
        complain "lint: the trainer's half includes the agent's:" "$found"
fi

# Only a room of the agent itself includes its private headers.
for room in src/agent/*/; do
        room=$(basename "$room")
        if found=$(grep -nE "^ *# *include *\"agent/$room/[a-z_]*_private\.h\"" -r src --include='*.c' --include='*.h' | grep -v "^src/agent/$room/"); then
                complain "lint: private headers of src/agent/$room in another room:" "$found"
        fi
done

# The catalogue knows no other room, and only a room itself reads or changes its slots of a job or a version (catalogue/room.h).
if found=$(grep -nE '^ *# *include *"agent/[a-z]+/' src/agent/catalogue/*.h | grep -v '"agent/catalogue/'); then
        complain "lint: a header of src/agent/catalogue includes another room's:" "$found"
fi
while read -r room slot; do
        if found=$(grep -nE "(->|\.)$slot->|(job|version)->$slot = " -r src/agent --include='*.c' --include='*.h' | grep -v "^src/agent/$room/"); then
                complain "lint: the slot \`$slot\` of src/agent/$room in another room:" "$found"
        fi
done < <(sed -nE 's#^src/agent/([a-z]+)/.*offsetof\(struct (job|version), ([a-z]+)\).*#\1 \3#p' <(grep -no 'offsetof(struct [a-z]*, [a-z]*)' -r src/agent --include='*_room.c'))

# Each lock has its place in one order (src/os/lock_order.h), which only the functions of lock.h check.
if found=$(grep -nE 'pthread_(mutex|rwlock|spin|cond_(timed)?wait)|PTHREAD_MUTEX' -r src --include='*.c' --include='*.h' | grep -v '^src/os/lock\.[ch]:'); then
        complain "lint: locks beside os/lock.h:" "$found"
fi

if found=$(git ls-files -z -- '*.c' '*.h' '*.py' '*.sh' '*.md' '*.build' Makefile |
        xargs -0 -r sh -c 'for f; do [ -f "$f" ] && grep -nHE "[[:blank:]]+$" "$f"; done; true' sh); [[ -n $found ]]; then
        complain "lint: blanks at the ends of lines:" "$found"
fi

# A module that meson.build does not list is not installed.
for module in $(git ls-files 'python/nebulaml/*.py'); do
        grep -q "'${module#python/}'" python/meson.build || complain "lint: python/meson.build lacks $module"
done

.venv/bin/ruff check --quiet . || failed=1
exit $failed
