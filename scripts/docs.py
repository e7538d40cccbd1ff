"""Makes the pages of the documentation: README.md, the guides of docs/, a reference from the docstrings, and the faults of faults.py.

    scripts/docs.sh        writes out/docs; fails for a link or an anchor that leads nowhere, and for a public name without a docstring
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import faults

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python/nebulaml"
PAGES = ROOT / "build/docs"
SESSION = "_session.session"
LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")
ARGUMENTS = re.compile(r"(\w+(?:, \w+)*): (.+)")  # a line of a docstring
ITEM = re.compile(r" *(?:[*-]|\d+\.) +")
SECTIONS = {
    "Checkpoints": ["init", "Checkpoint", "get_latest_checkpoint", "get_checkpoint", "get_latest_checkpoint_path", "list_checkpoints",
                    "checkpoints", "flush_persistence", "prepare", "find_published", "unpublish", "persist_path", "is_initialized", "stats"],
    "Manager and sessions": ["Manager", "Best", "Far", "Restored", "Session", "Reader", "Event"],
    "Published weights": ["Publisher", "Subscriber", "Published", "publish"],
    "Frameworks": ["attach", "NebulaCheckpointIO", "NebulaTrainerMixin", "export_hf", "HFExport", "export_safetensors", "wait_for_exports",
                   "rng_state", "set_rng_state"],
    "Elastic jobs, metrics and traces": ["ElasticSampler", "progress", "phase", "MetricsLog", "log_to", "watch", "profiler_track",
                                         "add_to_trace"],
    "Errors": ["NebulaError", "NebulaConfigError", "NebulaCorrupt", "NebulaNotFound", "NebulaPicklingError", "NebulaStorageError",
               "NebulaTimeout", "NebulaUnavailable"],
}  # fmt: skip
INHERITED = ["    options:", "      inherited_members: true"]  # the base class is private
# Classes that are made when they are first used, from those of the framework that is installed: docs/frameworks.md and
# docs/publish.md describe them.
MADE = {
    "NebulaCallback", "NebulaDeepspeedStrategy", "NebulaFSDPStrategy", "NebulaFabricFSDPStrategy", "NebulaFabricModelParallelStrategy",
    "NebulaModelParallelStrategy", "PublishCallback",
}  # fmt: skip


def module_at(name: str) -> Path:
    path = PACKAGE.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def sources() -> dict[str, str]:
    """Returns the public names of the package, and the module from which each is imported."""
    found: dict[str, str] = {}
    public: set[str] = set()
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {name.name: node.module for name in node.names}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public |= set(ast.literal_eval(node.value))
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "_LAZY" and node.value is not None:
            lazy = {name: module.lstrip(".") for name, module in ast.literal_eval(node.value).items()}
            found, public = found | lazy, public | set(lazy)
    return {name: module for name, module in found.items() if name in public and not name.startswith("_")}


def defined(name: str, module: str) -> tuple[str, ast.AST]:
    """Follows imports. Returns the module that defines a name, and its definition."""
    for node in ast.parse(module_at(module).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and any((each.asname or each.name) == name for each in node.names):
            above = module.split(".")[: -node.level] if node.level else []
            return defined(name, ".".join([*above, *(node.module or "").split(".")]).strip("."))
        if isinstance(node, ast.Assign) and ast.unparse(node) == f"{name} = default.{name}":  # a method of the default session
            body = next(each for each in ast.parse(module_at(SESSION).read_text()).body if getattr(each, "name", "") == "Session")
            return f"{SESSION}.Session", next(each for each in body.body if getattr(each, "name", "") == name)
    raise SystemExit(f"docs: nebulaml.{name} is not defined in {module}")


def reference() -> str:
    """Returns a page of directives for mkdocstrings."""
    public = sources()
    listed = {name for names in SECTIONS.values() for name in names}
    missing = set(public) - listed - MADE
    if missing:
        raise SystemExit(f"docs: scripts/docs.py lists no section for {', '.join(sorted(missing))}")
    lines = ["# Reference", "", "This page is made from the docstrings of `nebulaml`. [python.md](python.md) is the guide.", ""]
    for title, names in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names:
            module, node = defined(name, public[name])
            if not ast.get_docstring(node):
                raise SystemExit(f"docs: nebulaml.{name} has no docstring")
            lines += [f"::: nebulaml.{module}.{name}", *(INHERITED if name == "Checkpoint" else []), ""]
    return "\n".join(lines)


def linked(text: str, folder: Path, where: str) -> str:
    """Returns the page with its links adapted. A file that is not a page becomes its plain name. A link to a missing file ends the run."""

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        file = (folder / target).resolve()
        if not file.exists():
            raise SystemExit(f"docs: {where} links to {target}, which is not there")
        name = file.relative_to(ROOT)
        if name == Path("scripts/faults.py"):
            return f"[{label}](faults.md)"
        if name == Path("README.md"):
            return f"[{label}](index.md{anchor})"
        if file.suffix == ".md" and file.parent == ROOT / "docs":
            return f"[{label}]({file.name}{anchor})"
        return f"{label} (`{name}`)" if str(name) not in label else label

    return LINK.sub(replace, text)


def spaced(text: str) -> str:
    """The page as Python-Markdown reads it: with a blank line before a list or table, and four spaces for each level of a list."""
    lines: list[str] = []
    columns: list[int] = []  # where the text of each open list item begins
    is_code = is_listing = False  # is_listing: the lines since the last blank one begin with an item
    for line in text.split("\n"):
        above = lines[-1].strip() if lines else ""
        bare = line.lstrip()
        indent = len(line) - len(bare)
        if bare.startswith("```"):
            is_code = not is_code
        elif not is_code and bare:
            item = ITEM.match(line)
            if item or indent or not above:  # without any of these, the line goes on with the item above
                while columns and indent < columns[-1]:
                    columns.pop()
            is_new = bool(above) and not is_listing and (bool(item) or (bare.startswith("|") and not above.startswith("|")))
            if is_new:
                lines.append("")
            if is_new or not above or item:
                is_listing = bool(item)
            if item or columns:
                line = "    " * len(columns) + bare
            if item:
                columns.append(len(item[0]))
        lines.append(line)
    return "\n".join(lines)


def listed(docstring: str, names: set[str]) -> str:
    """The docstring with a list of the arguments that it describes: lines "name: text" and the indented lines after each."""
    lines: list[str] = []
    is_list = False
    for line in docstring.split("\n"):
        match = ARGUMENTS.match(line)
        if match and names.issuperset(match[1].split(", ")):
            lines += ["", f"* **{match[1]}**: {match[2]}"] if not is_list else [f"* **{match[1]}**: {match[2]}"]
            is_list = True
        elif is_list and line.strip() and not line.startswith(" "):
            lines += ["", line]
            is_list = False
        else:
            lines.append(line)
    return "\n".join(lines)


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for path in (ROOT / "docs").iterdir():
        if path.suffix == ".md":
            (PAGES / path.name).write_text(spaced(linked(path.read_text(), path.parent, f"docs/{path.name}")))
        else:
            shutil.copy(path, PAGES)
    (PAGES / "index.md").write_text(spaced(linked((ROOT / "README.md").read_text(), ROOT, "README.md")).replace("docs/", ""))
    (PAGES / "reference.md").write_text(reference())
    (PAGES / "faults.md").write_text(spaced(faults.page()))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml")]  # --quiet would count no warnings
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ruff breaks long signatures into lines
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PATH": path, "PYTHONPATH": str(ROOT / "scripts")}  # for docstrings.py
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    else:
        print("docs: out/docs/index.html")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
