"""The tests do not build the image of the Dockerfile: they parse its instructions, and check that the files in them exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, full, interpreter

PARSE = """
import dockerfile, json, sys
print(json.dumps([[step.cmd.lower(), list(step.flags), list(step.value)] for step in dockerfile.parse_file(sys.argv[1])]))
"""


@full
def test_the_dockerfile_names_stages_and_debian_packages_that_exist():
    text = subprocess.check_output([interpreter("job-files"), "-c", PARSE, ROOT / "Dockerfile"], text=True)
    steps = json.loads(text)
    stages = [value[-1] for command, _, value in steps if command == "from" and len(value) == 3]
    sources = [flag.partition("=")[2] for command, flags, _ in steps if command == "copy" for flag in flags]
    assert stages == ["build"] and sources == ["build"]
    assert steps[-1][0] == "cmd" and steps[-2] == ["user", [], ["nebula"]]
    wanted = [
        name
        for command, _, value in steps
        if command == "run"
        for line in re.findall(r"apt-get install -y --no-install-recommends ([^&]+)", " ".join(value))
        for name in line.split()
    ]
    assert len(wanted) > 10
    if shutil.which("apt-cache") is None or "bookworm" not in Path("/etc/os-release").read_text():
        pytest.skip("only Debian 12 knows the names of its packages")
    known = subprocess.run(["apt-cache", "show", "--no-all-versions", *wanted], capture_output=True, text=True, check=False).stdout
    assert [name for name in wanted if not re.search(rf"^Package: {re.escape(name)}$", known, re.M)] == []
