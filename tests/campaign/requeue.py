"""Stories of a job that moves between nodes whose agents live on, and a model of what each node may load.

A story is a list of commands (requeue_player.c explains them). A player answers each; ``judge`` compares the answers with the model and
returns the first answer that is wrong. ``shrink`` drops commands as long as the story stays wrong.

The model knows what storage has, which versions were committed and never persisted on a node (leftovers), and what the present run has
saved. It allows every answer that the rules of docs/protocol.md allow, and no other:

* The newest is the last version that a run has committed, unless that only changed an earlier step of its line. A new run finds the
  newest durable one, or a leftover of its node.
* A tag is the last writing of the run, else the last one in storage, else a leftover of the node.
* All files of a version are of one history: its own, and those of the writing before it.
* Retention removes what a run has found before what it has saved.
* "none" means that nothing is there. If storage cannot be read, the answer is an error, or says that something may have been passed over.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Story = list[str]
NODES = "012"
OTHER_TAGS = ("last", "best")


@dataclass
class Writing:
    """One writing of a tag. ``contents``: the files that it may have."""

    tag: str
    run: str
    number: int
    own: dict[str, str]
    contents: list[dict[str, str]]
    amends: bool = False  # it changes an earlier step of its line, and is not newer for that
    durable: bool = False
    may_fail: bool = False
    is_settled: bool = True  # once it is durable, it has all files of the writing before it

    @property
    def step(self) -> int | None:
        return int(self.tag[11:]) if self.tag.startswith("global_step") else None


@dataclass
class Model:
    """The state of the world, and the checks of a player's answers."""

    node: str = "0"
    run: str = ""
    keep: int = 0
    kept: bool = False  # some run had a rule
    storage: dict[str, Writing] = field(default_factory=dict)
    leftovers: dict[str, list[Writing]] = field(default_factory=dict)  # by node
    maybe: list[Writing] = field(default_factory=list)  # leftovers that may have become durable
    removed: dict[str, list[Writing]] = field(default_factory=dict)  # by tag: removed by hand; memory may still have it
    saved: list[Writing] = field(default_factory=list)  # by the present run, in order
    found: set[str] = field(default_factory=set)  # tags that storage had when the run began
    numbers: int = 0
    faults: int = 0
    newest_is_open: bool = False  # the newest was removed by hand: what follows it is not modelled
    read_steps: list[tuple[int, int]] = field(default_factory=list)  # (number of writings at that time, step)
    is_late: bool = False  # the run has taken an answer while storage failed
    has_threads: bool = False  # agents persist when they like, so what a node has lost may be in storage

    # -- what the rules allow

    def _unsaved(self) -> list[Writing]:
        """The leftovers that this node may have."""
        own = self.leftovers.setdefault(self.node, [])
        own = [one for left in self.leftovers.values() for one in left] if self.has_threads else own
        return own + [one for one in self.maybe if one not in own]

    def _newest_of(self, writings: Iterable[Writing]) -> Writing | None:
        candidates = [one for one in writings if not one.amends]
        return max(candidates, key=lambda one: one.number, default=None)

    def newest(self) -> list[Writing]:
        own = self._newest_of(one for one in self.saved if self._is_current(one))
        if own is not None:
            return [own]
        durable = self._newest_of(self.storage.values())
        return [*([durable] if durable else []), *self._unsaved()]

    def _is_current(self, writing: Writing) -> bool:
        later = [one for one in self.saved if one.tag == writing.tag and one.number > writing.number]
        return not later and (not writing.durable or self.storage.get(writing.tag) is writing)

    def of_tag(self, tag: str) -> list[Writing]:
        own = [one for one in self.saved if one.tag == tag]
        if own and own[-1] not in self.removed.get(tag, []):
            return [own[-1]]
        stored = self.storage.get(tag)
        leftovers = [one for one in self._unsaved() if one.tag == tag]
        return [*([stored] if stored else []), *leftovers, *self.removed.get(tag, [])]

    # -- commands

    def apply(self, command: str, answer: str) -> str | None:
        """Applies a command and its answer. Returns why the answer is wrong; None: it is right."""
        word, *rest = command.split(" ")
        if answer.startswith("error") and word not in ("newest", "load"):
            return f"fails: {answer}"
        return getattr(self, f"_{word}")(answer, *rest)

    def _node(self, answer: str, node: str) -> None:
        self._leave()
        self.node = node

    def _leave(self) -> None:
        unsaved = [one for one in self.saved if not one.durable and self._is_current(one)]
        self.leftovers.setdefault(self.node, []).extend(unsaved)
        self.saved, self.run = [], ""

    def _run(self, answer: str, name: str, keep: str) -> None:
        self._leave()
        self.run, self.keep = name, int(keep)
        self.kept |= bool(self.keep)
        self.found = set(self.storage)
        self.read_steps, self.is_late = [], False

    def _scan(self, answer: str) -> None:
        pass

    def _kill(self, answer: str) -> None:
        self._leave()

    def _forget(self, answer: str) -> None:
        self._leave()
        if not self.has_threads:
            self.leftovers[self.node] = []

    def _fault(self, answer: str, count: str) -> None:
        self.faults = int(count)

    def _newest(self, answer: str) -> str | None:
        return self._check_found(answer, self.newest(), is_open=self.newest_is_open)

    def _load(self, answer: str, tag: str) -> str | None:
        return self._check_found(answer, self.of_tag(tag), is_open=False, tag=tag)

    def _check_found(self, answer: str, allowed: list[Writing], is_open: bool, tag: str = "") -> str | None:
        is_blind = self.faults < 0 and not [one for one in self.saved if not tag or one.tag == tag]
        is_disturbed, self.faults = self.faults != 0, min(self.faults, 0)  # the search has met the first failures
        if answer.startswith("error"):
            return None if is_disturbed or "removed or written again" in answer else f"fails: {answer}"
        if answer == "none":
            certain = [one for one in allowed if one not in self._unsaved() and one not in self.removed.get(one.tag, [])]
            if tag and self.has_threads and self.kept:
                return None  # retention may have acted since
            if is_blind and self.storage:
                return "none, though storage cannot be read"
            return f"none, and {certain[0].tag} is there" if certain and not is_open else None
        found, passed, *files = answer.split(" ")
        content = dict(one.split("=") for one in files)
        if "-1" in content.values():
            if is_disturbed or any(one.tag == found and one.may_fail for one in allowed):
                return None  # it kept files of a writing that was removed by hand since
            return f"cannot be read: {answer}"
        if is_blind and int(passed):
            self.is_late = True
            self._note_read(found)
            return None
        if is_open:
            allowed = [*allowed, *self.storage.values(), *self._unsaved(), *filter(self._is_current, self.saved)]
        matching = [one for one in allowed if one.tag == found]
        if not matching:
            return f"is {found}, and not {' or '.join(sorted({one.tag for one in allowed})) or 'none'}"
        if not any(content in one.contents for one in matching):
            return f"{found} has {content}, and not {' or '.join(str(one.contents) for one in matching)}"
        for one in matching:
            if content in one.contents:
                self._note_read(found)
                if one.durable:
                    one.contents = [content]
                break
        return None

    def _note_read(self, tag: str) -> None:
        if tag.startswith("global_step"):
            self.read_steps.append((self.numbers, int(tag[11:])))

    def _save(self, answer: str, tag: str, *files: str) -> None:
        own = dict(one.split("=") for one in files)
        self.numbers += 1
        before = [one for one in self.saved if one.tag == tag]
        bases = before[-1:] or self.of_tag(tag)
        contents = [{**content, **own} for base in bases for content in base.contents]
        if not before or (before[-1].durable and self.storage.get(tag) is not before[-1]):
            contents.append(own)  # until storage was compared, or since the writing before was removed by hand
        is_settled = all(base.is_settled for base in bases) and (not before or not before[-1].durable or self.storage.get(tag) is before[-1])
        writing = Writing(tag, self.run, self.numbers, own, contents, is_settled=is_settled and not self.removed.get(tag))
        head = self._newest_of(one for one in [*self.storage.values(), *self.saved, *self._unsaved()] if one.step is not None)
        if writing.step is not None and head is not None and head.step is not None and writing.step < head.step:
            reads_head = any(step >= head.step for _, step in self.read_steps)
            is_partial = any(set(base.contents[0]) - set(own) for base in bases if base.contents)
            went_back = any(step < head.step and at >= head.number for at, step in self.read_steps)
            writing.amends = (bool(before) and not went_back) or (is_partial and reads_head)
            if is_partial or (before and went_back):
                self.newest_is_open = True  # both is allowed: which one depends on what was read last, and when storage was compared
        if not writing.amends:
            self.newest_is_open = self.newest_is_open and writing.step is None
        self.saved.append(writing)

    def _persist(self, answer: str) -> str | None:
        self.faults = min(self.faults, 0)
        if self.faults < 0:
            return None if set(answer.split(" ")) - {""} == set(self.storage) else "storage changed while it failed"
        written: list[Writing] = []
        for writing in [*self._unsaved(), *self.saved]:
            stored = self.storage.get(writing.tag)
            if writing.durable:
                continue
            is_leftover = writing not in self.saved
            if is_leftover and (self.has_threads or (stored is not None and stored.run != writing.run and stored not in written)):
                self.maybe.append(writing)  # it gives way, or follows what its run had found
                continue
            if [one for one in self.saved if one.tag == writing.tag and one.number > writing.number]:
                continue
            writing.durable = True
            written.append(writing)
            if writing.is_settled:
                writing.contents = [content for content in writing.contents if len(content) == max(map(len, writing.contents))]
            self.storage[writing.tag] = writing
            self.removed.pop(writing.tag, None)
        self.leftovers = {node: [one for one in left if not one.durable] for node, left in self.leftovers.items()}
        return self._compare(set(answer.split(" ")) - {""})

    def _prune(self, answer: str, tag: str) -> None:
        writing = self.storage.pop(tag, None)
        if writing is not None:
            self.removed.setdefault(tag, []).append(writing)
            if not writing.amends:
                self.newest_is_open = True
        self.found.discard(tag)
        for one in [*self.saved, *(one for left in self.leftovers.values() for one in left)]:
            if one.tag == tag and not one.durable:  # its other files may have gone with the removed writing
                one.is_settled, one.may_fail = False, True
                one.contents.append(one.own)

    def _compare(self, tags: set[str]) -> str | None:
        """Compares the tags in storage, after retention."""
        for tag in [tag for tag, one in self.storage.items() if one.may_fail and tag not in tags]:
            del self.storage[tag]
            self.newest_is_open = True
        gone = set(self.storage) - tags
        more = tags - set(self.storage)
        # a leftover may have become durable, if it did not give way
        late = {one.tag: one for one in sorted(self._unsaved(), key=lambda one: one.number)}
        for tag in sorted(more):
            if tag not in late:
                return f"storage has {tag}, and the model does not"
            late[tag].durable = True
            self.storage[tag] = late[tag]
            self.newest_is_open = True
        if gone and not self.keep:
            return f"{sorted(gone)} went, and nothing said so"
        saved = [one for one in self.saved if not one.amends and self._is_current(one) and one.durable]
        lost = [one.tag for one in saved if one.tag in gone]
        kept = [tag for tag in self.found & tags if self.storage[tag] not in self.saved]
        if lost and kept and not self.is_late and not self.newest_is_open:
            return f"retention took {lost}, which the run has saved, and left {kept}, which it had found"
        if saved and saved[-1].tag in gone:
            return f"retention took {saved[-1].tag}, the newest"
        if gone and len(tags) < self.keep:
            return f"retention left {sorted(tags)}, fewer than {self.keep}"
        for tag in gone:
            self.removed.setdefault(tag, []).append(self.storage.pop(tag))
        return None


def judge(story: Story, answers: list[str], has_threads: bool = False) -> str | None:
    """Returns the first wrong answer of a player, with the command; None: all are right."""
    model = Model(has_threads=has_threads)
    for command, answer in zip(story, answers, strict=True):
        problem = model.apply(command, answer)
        if problem:
            return f"{command}: {problem}"
    return None


def write(seed: int, length: int = 14, faults: Sequence[int] = (1, 2, -1), is_left: bool = True) -> Story:
    """Returns a story: runs on nodes in turn, each looks, saves, becomes durable, and ends in one of several ways.

    faults: those that happen. is_left: a run may be left with versions that are not durable, without a kill.
    """
    dice = random.Random(seed)
    story: Story = []
    step, value, runs = 0, 0, 0
    tags: list[str] = []
    while len(story) < length:
        runs += 1
        story += [f"node {dice.choice(NODES)}", f"run r{runs} {dice.choice([0, 0, 0, 2, 3])}"]
        if dice.random() < 0.3:
            story.append("scan")
        fault = dice.choices(faults, [6, 3, 1][-len(faults) :])[0] if faults and dice.random() < 0.2 else 0
        if fault:
            story.append(f"fault {fault}")
        story += dice.choice([["newest"], ["newest"], ["newest"], [f"load {dice.choice(tags)}"] if tags else [], []])
        if fault:
            story.append("fault 0")
        for _ in range(dice.randrange(4)):
            kind = dice.random()
            if kind < 0.55:
                step += 1
                tag = f"global_step{step}"
            elif kind < 0.7 and step > 1:
                step = dice.randrange(1, step)
                tag = f"global_step{step}"
            else:
                tag = dice.choice(OTHER_TAGS)
            files = dice.choice([["x", "y"], ["x", "y"], ["x"], ["y"]])
            value += len(files)
            story.append(f"save {tag} " + " ".join(f"{name}={value - i}" for i, name in enumerate(files)))
            tags.append(tag)
            if dice.random() < 0.3:
                story.append(dice.choice(["newest", f"load {dice.choice(tags)}"]))
            if dice.random() < 0.4:
                story += ["persist"]
        if tags and dice.random() < 0.1:
            story += [f"prune {dice.choice(tags)}"]
        ends = [["persist"], ["persist"], ["persist", "kill"], ["kill"], ["persist", "forget"], ["forget"], []]
        story += dice.choice(ends if is_left else ends[:-1])
    for node in NODES:
        runs += 1
        story += [f"node {node}", f"run r{runs} 0", "newest", *(f"load {tag}" for tag in dict.fromkeys(tags[-3:]))]
    return story


def _is_sound(story: Story) -> bool:
    is_running = False
    for command in story:
        word = command.split(" ")[0]
        if word in ("node", "kill", "forget", "run"):
            is_running = word == "run"
        elif word in ("newest", "load", "save") and not is_running:
            return False
    return True


def shrink(story: Story, is_wrong: Callable[[Story], bool]) -> Story:
    """Drops commands as long as the story stays wrong."""
    size = len(story) // 2
    while size:
        at = 0
        while at < len(story):
            shorter = story[:at] + story[at + size :]
            if shorter and _is_sound(shorter) and is_wrong(shorter):
                story = shorter
            else:
                at += size
        size //= 2
    return story


class InProcess:
    """Plays stories on agents without threads, in one process (requeue_player.c). store: "file", or "mem" for the objects of the reference driver."""

    def __init__(self, program: Path, store: str = "file") -> None:
        environment = os.environ | {"NEBULA_TEST_STORE": store}
        self.faults = (1, 2, -1) if store == "file" else ()  # those that the player can make
        self._player = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def play(self, story: Story) -> list[str]:
        assert self._player.stdin is not None and self._player.stdout is not None
        self._player.stdin.write("\n".join([*story, "end"]) + "\n")
        self._player.stdin.flush()
        answers = [self._player.stdout.readline().rstrip("\n") for _ in range(len(story) + 1)]
        assert answers[-1] == "ok", answers
        return answers[:-1]

    def close(self) -> None:
        assert self._player.stdin is not None
        self._player.stdin.close()
        assert self._player.wait(60) == 0


def explain(story: Story, answers: list[str], has_threads: bool = False) -> str:
    """Returns the story with its answers, up to the wrong one."""
    lines, model = [], Model(has_threads=has_threads)
    for command, answer in zip(story, answers, strict=True):
        problem = model.apply(command, answer)
        lines.append(f"{command:30} {answer}" + (f"     <- {problem}" if problem else ""))
        if problem:
            break
    return re.sub(r" +\n", "\n", "\n".join(lines))
