#!/usr/bin/env bash
# phase.sh FILE NAME - says when a phase begins, and what share of this machine's cores the phases before it have used. FILE keeps the start.
set -euo pipefail
file=$1 name=$2
read -r _ user nice system idle wait rest </proc/stat
used=$((user + nice + system)) all=$((user + nice + system + idle + wait))
now=$(date +%s)
if [[ -f $file ]]; then
        read -r begun last_used last_all <"$file"
        share=", $(((used - last_used) * 100 / (all - last_all > 0 ? all - last_all : 1))) % of the cores were busy since the last"
else
        begun=$now share=
fi
printf '== %d:%02d %s%s\n' $(((now - begun) / 60)) $(((now - begun) % 60)) "$name" "$share"
echo "$begun $used $all" >"$file"
