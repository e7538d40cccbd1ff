"""symbols.py LIBRARY MAP HEADER: the library exports the functions of the header, with the version of the map, and no other."""

import re
import subprocess
import sys
from pathlib import Path

library, version_map, header = sys.argv[1:]
declared = set(re.findall(r"NEBULA_API[^;]*?\b(nebula_\w+)\(", Path(header).read_text()))
text = Path(version_map).read_text()
listed = set(re.findall(r"^ +(nebula_\w+);", text, re.M))
version = re.search(r"^(\w+) \{", text, re.M)[1]
shown = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
exported = {line.split()[2] for line in shown.splitlines() if line.split()[1] != "A"}

problems = [f"{name} is in {a}, but not in {b}" for a, b, names in (
    (header, version_map, declared - listed),
    (version_map, header, listed - declared),
) for name in sorted(names)]
problems += [f"{name} is exported by mistake, or without its version" for name in sorted(exported - {f"{name}@@{version}" for name in listed})]
problems += [f"{name} is not exported" for name in sorted({f"{name}@@{version}" for name in listed} - exported)]
print("\n".join(problems))
sys.exit(bool(problems))
