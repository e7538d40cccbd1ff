"""The examples of README.md and docs/python.md run as they stand, in the order of the text, in one process, as a reader would try them.

All documents keep their links.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/python.md").read_text() if (ROOT / "docs").exists() else ""
EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)

# The names that a program has before the first example. The trainers of the tests begin with imports.
CLEAN = "for name in [name for name in globals() if name[:2] != '__' and name not in ('os', 'sys', 'say')]: del globals()[name]\n"
# For the example under each heading: what a reader does before it, by another way than an example, and checks that run after it.
AROUND = {
    "Nebula in Python": ("", ""),
    "Start": ("", "assert nm.get_latest_checkpoint().step == 500"),
    "Saving": ("", 'assert checkpoint.metrics == {"val_loss": loss} and checkpoint.metadata == {"data": "v3"}'),
    "The first save": ("", ""),
    "Loading": (
        "saved = {name: value.clone() for name, value in model.state_dict().items()}\nmodel.weight.data.zero_()",
        r"""
assert latest.step == 600 and words == b"the\nof\nand\n"
for found in (state, model.state_dict()):
    assert all(torch.equal(found[name], saved[name]) for name in saved)
""",
    ),
    "Going back": (
        """
nm.init("/scratch/back", 0)
for step, value in ((300, 7.0), (400, 8.0)):
    with nm.Checkpoint(f"global_step{step}") as before:
        before.save("model.pt", {"weight": torch.full((2, 3), value), "bias": torch.zeros(2)})
""",
        """
assert (model.weight == 7).all()
with nm.Checkpoint("global_step310") as after:
    after.save("model.pt", model.state_dict())
nm.flush_persistence()
assert nm.get_latest_checkpoint().step == 310 and nm.list_checkpoints()["global_step400"]["abandoned"]
nm.init("/scratch/run7")
""",
    ),
    "Readers": ("", "assert checkpoint.step == 600 and set(weights) == {'weight', 'bias'}"),
    "The manager": (
        "",
        """
with nm.Manager("/scratch/run8") as again:
    assert again.latest_step() == 500 and "val_loss" in again.checkpoint(500).metrics
    assert again.restore(items).extra == {"epoch": 5}
""",
    ),
    "Several ranks": ("", 'assert set(nm.get_latest_checkpoint().files) == {"model.pt", "rng0.pt"}'),
    "Frameworks": (
        "kept = model.weight.detach().clone()",
        "import os\nassert torch.equal(state['model']['weight'], kept)\nos.remove('/scratch/run9/step-100/.metadata')",
    ),
    "Several sessions": (
        "",
        """
with nm.Session("/scratch/evals") as again:
    assert again.get_latest_checkpoint().load("scores.pt") == [0.7, 0.9]
""",
    ),
}


def heading_above(text: str, position: int) -> str:
    return re.findall(r"^#+ (.*)$", text[:position], re.M)[-1]


@pytest.mark.skipif(not TEXT, reason="the documents are not here")
def test_the_examples_of_the_guide_run_one_after_the_other(place):
    found = {heading_above(TEXT, match.start()): (TEXT.count("\n", 0, match.start()) + 1, match[1]) for match in EXAMPLE.finditer(TEXT)}
    assert len(found) == len(EXAMPLE.findall(TEXT)), "two examples under one heading"
    assert found.keys() == AROUND.keys()
    program = CLEAN
    for title, (line, example) in found.items():
        before, after = AROUND[title]
        compiled = f"exec(compile({chr(10) * line + example!r}, 'docs/python.md', 'exec'))"  # a failure names the line of the document
        program += f"\n{before}\n{compiled}\n{after}\nsay('example:', {title!r})\n"
    output = place.run(program.replace("/scratch", str(place.root / "scratch")))
    assert [line for line in output.splitlines() if line.startswith("example:")] == [f"example: {title}" for title in AROUND]


@pytest.mark.skipif(not TEXT, reason="the documents are not here")
def test_the_examples_of_the_readme_run_from_a_clean_directory_twice(place):
    first, *rest = EXAMPLE.findall((ROOT / "README.md").read_text())
    assert "for step in range" in rest[-1]
    scratch = str(place.root / "scratch")
    for example, newest in ((first, 100), ("\n".join(rest), 1000), ("\n".join(rest).replace("1000", "1100"), 1100)):
        code = example.replace("/scratch/run7", f"{scratch}/{len(example)}" if example == first else scratch)
        place.run(f"{CLEAN}{code}\nnm.flush_persistence()\nassert nm.get_latest_checkpoint().step == {newest}, nm.checkpoints()")


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    """scripts/docs.py, which makes the pages."""
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts/docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "scripts"))  # it imports faults
        spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not TEXT, reason="the documents are not here")
def test_the_reference_has_every_public_name(docs):
    listed = set(re.findall(r"^::: nebulaml\.(?:.*\.)?(\w+)$", docs.reference(), re.M))
    assert listed == set(docs.sources()) - docs.MADE


def test_the_reference_lists_the_arguments_that_a_docstring_describes(docs):
    text = "Saves.\n\nname: of the file. More\n    of it.\na, b: two.\nNote: no argument.\nThe end."
    page = "Saves.\n\n\n* **name**: of the file. More\n    of it.\n* **a, b**: two.\n\nNote: no argument.\nThe end."
    assert docs.listed(text, {"name", "a", "b", "c"}) == page


@pytest.mark.skipif(not TEXT, reason="the documents are not here")
def test_lists_and_tables_of_the_documents_are_lists_and_tables_on_the_pages(docs):
    text = "Rules:\n* one\n  goes on\n  1. inner\n     * deep\n\n  More:\n  * two\n\nText\n| a |\n| - |\n\n    code\n\n```\n* no item\n```\n"
    page = "Rules:\n\n* one\n    goes on\n    1. inner\n        * deep\n\n    More:\n\n    * two\n\nText\n\n| a |\n| - |\n\n    code\n\n```\n* no item\n```\n"
    assert docs.spaced(text) == page


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, and those that it sets itself."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles} | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.skipif(not TEXT, reason="the documents are not here")
def test_every_link_of_the_documents_leads_to_a_file_and_a_heading(docs):
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")]
    broken = []
    for page in pages:
        for match in re.finditer(r"\[[^\]\[]+\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text()):
            target, anchor = match[1], match[2]
            if "://" in target or target.startswith("mailto:"):
                continue
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text())):
                broken.append(f"{page.relative_to(ROOT)}: {match[0]}")
    assert len(pages) > 20 and not broken
