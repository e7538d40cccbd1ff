"""Prints how much of the C half its tests execute, and how many of its error paths: coverage.py BUILD [--floor LINES ERRORS].

BUILD: a build directory with -Db_coverage=true whose tests have run. An error path is a line that makes an error (error_set, document_wrong) or
returns an errno, but not for want of memory. With --floor, in percent, the program fails below either. out/coverage.txt has each error path
that no test takes.
"""

import argparse
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IS_ERROR = re.compile(r"\berror_set\((?!.*NEBULA_NO_MEMORY)|\bdocument_wrong\(|return -errno|return -E(?!NOMEM)[A-Z]+;")


def counts(build: Path) -> dict[Path, Counter[int]]:
    """Returns how often each line ran, by file. A header's line counts once for all objects."""
    found: dict[Path, Counter[int]] = defaultdict(Counter)
    data = sorted(build.rglob("*.gcno"))  # also of objects that no test runs
    if not any(build.rglob("*.gcda")):
        sys.exit(f"coverage: no test has run in {build}")
    for begin in range(0, len(data), 50):
        done = subprocess.run(
            ["gcov", "-j", "-t", *map(str, data[begin : begin + 50])],
            cwd=build,
            capture_output=True,
            text=True,
            check=True,
        )
        for text in done.stdout.splitlines():
            for file in json.loads(text)["files"]:
                path = (build / file["file"]).resolve()
                if path.is_relative_to(ROOT / "src"):
                    for line in file["lines"]:
                        found[path][line["line_number"]] += line["count"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("build", type=Path)
    parser.add_argument("--floor", nargs=2, type=float, metavar=("LINES", "ERRORS"), default=(0.0, 0.0))
    chosen = parser.parse_args()
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    missed = []
    for path, lines in sorted(counts(chosen.build.resolve()).items()):
        room = rooms[str(path.relative_to(ROOT).parent)]
        source = path.read_text().splitlines()
        for number, ran in sorted(lines.items()):
            is_error = bool(IS_ERROR.search(source[number - 1]))
            room.update(lines=1, ran=ran > 0, errors=is_error, failed=is_error and ran > 0)
            if is_error and not ran:
                missed.append(f"{path.relative_to(ROOT)}:{number}: {source[number - 1].strip()}")
    rooms["all"] = sum(rooms.values(), Counter())
    print(f"{'room':32} {'lines':>7} {'run':>7} {'errors':>7} {'made':>7}")
    for name, room in rooms.items():
        ran, made = percent(room["ran"], room["lines"]), percent(room["failed"], room["errors"])
        print(f"{name:32} {room['lines']:7} {ran:6.1f}% {room['errors']:7} {made:6.1f}%")
    out = ROOT / "out/coverage.txt"
    out.parent.mkdir(exist_ok=True)
    out.write_text("\n".join(missed) + "\n")
    print(f"{len(missed)} error paths that no test takes: {out.relative_to(ROOT)}")
    return int(ran < chosen.floor[0] or made < chosen.floor[1])  # of all, the last row


def percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


if __name__ == "__main__":
    sys.exit(main())
