"""Completion in bash, zsh and fish: commands, options, tags and files, from the same table as the help."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _nebula
printf '%s\\n' "${COMPREPLY[@]}"
"""
# Prints the words that the completion adds, in place of the functions of zsh's own completion.
ZSH = """
compadd() { shift; print -l -- "$@" }; _describe() { print -l -- ${subcommands%%:*} }; _files() { print files }
file=$1; shift; words=("$@"); CURRENT=$#; PREFIX=$words[CURRENT]; source $file
"""


@pytest.fixture(params=["bash", "zsh", "fish"])
def complete(request, nebula, tmp_path):
    """Returns a function: the completions of the words of a line, of which the last one is not finished."""
    shell = request.param
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not here")
    script = tmp_path / "completion"
    script.write_bytes(subprocess.check_output([sys.executable, ROOT / "scripts/completion.py", shell, ROOT / "src/cli/main.c"]))
    environment = {"PATH": f"{nebula.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "NEBULA_RUNTIME_DIR": str(tmp_path / "none")}

    def run(*words):
        words = [str(word) for word in words]
        line = {
            "bash": ["bash", "-c", BASH, "bash", script, *words],
            "zsh": ["zsh", "-fc", ZSH, "zsh", script, *words],
            "fish": ["fish", "--no-config", "-c", f"source {script}; complete -C '{' '.join(words)}'"],
        }[shell]
        done = subprocess.run(line, capture_output=True, text=True, env=environment, timeout=60)
        assert done.returncode == 0 or shell != "bash", done.stderr
        return {one.split("\t")[0] for one in done.stdout.splitlines() if one.startswith(words[-1])}

    return run


def test_commands_options_tags_and_files_are_completed(complete, make, run):
    for step in (1, 2):
        store = make(f"global_step{step}", "model.pt=100", "optim.pt=10")
    overview = re.findall(r"^  ([a-z]+) ", run("help").stdout, re.M)
    assert complete("nebula", "") >= set(overview) and complete("nebula", "insp") == {"inspect"}
    assert {"--sample", "--bytes", "--time", "--all", "--help"} <= complete("nebula", "verify", "--")
    assert complete("nebula", "list", "--st") == {"--stats"}
    assert complete("nebula", "sign", "--p") == {"--p256", "--path"}
    assert complete("nebula", "verify", "--path", store, "global") == {"global_step1", "global_step2"}
    assert complete("nebula", "prune", "--path", store, "--tag", "global") == {"global_step1", "global_step2"}
    assert complete("nebula", "pin", "--path", store, "lat") == {"latest"}


def test_files_of_a_tag_are_completed_in_bash_and_zsh(complete, make, request):
    if request.node.callspec.params["complete"] == "fish":
        pytest.skip("fish completes tags only")
    store = make("global_step1", "model.pt=100", "optim.pt=10")
    assert complete("nebula", "inspect", "--path", store, "latest", "mod") == {"model.pt"}


# fault (The machine and other users): A tag and a file in shared storage have names that a shell would run.
# result: Completion offers them as they are, and runs nothing.
def test_a_name_in_storage_is_offered_and_never_run(complete, make, tmp_path, request):
    is_fish = request.node.callspec.params["complete"] == "fish"
    names = [f"{one}touch {tmp_path}/ran{i}{end}" for i, (one, end) in enumerate([("a$(", ")"), ("a`", "`"), ("a'; ", ";'"), ("a*", "")])]
    for name in names:
        store = make(name, f"{name}=10")
    offered = complete("nebula", "inspect", "--path", store, "a")
    assert is_fish or offered == set(names)
    complete("nebula", "inspect", "--path", store, "latest", "a")
    assert not list(tmp_path.glob("ran*"))
