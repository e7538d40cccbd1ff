#!/usr/bin/env bash
# clang's static analyzer over each C file of src, as BUILD/compile_commands.json has it: analyze.sh BUILD. A finding that is not in analyzed.txt fails.
#
# Those in analyzed.txt are false: the analyzer does not know that a function of another file returns an error, or what it has set.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1

analyze() {
        (cd "$build" && clang --analyze -Xanalyzer -analyzer-output=text -Xanalyzer -analyzer-disable-checker=deadcode.DeadStores "$@" 2>&1) || true
}
export -f analyze
export build
python3 - "$build" <<'PYTHON' | xargs -P "$(nproc)" -I{} bash -c 'analyze {}' >"$build/analyzed"
import json, re, shlex, sys
from pathlib import Path
seen = set()
for entry in json.loads(Path(sys.argv[1], "compile_commands.json").read_text()):
    if entry["file"].startswith("../src/") and entry["file"] not in seen:
        seen.add(entry["file"])
        print(shlex.join([*re.findall(r"-[DI]\S+|-std=\S+", entry["command"]), entry["file"]]))
PYTHON
found=$(grep -E ': (warning|error):' "$build/analyzed" | sed -E 's#^\.\./##; s/:[0-9]+:[0-9]+: warning:/:/' | sort -u | grep -vxFf scripts/analyzed.txt || true)
if [[ $found ]]; then
        echo "$found" >&2
        echo "analyze: the reasons are in $build/analyzed" >&2
        exit 1
fi
echo "analyze: no finding but the false ones of scripts/analyzed.txt"
