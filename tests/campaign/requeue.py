"""Stories of a job that moves between nodes whose agents live on, and a model of what each node may load.

A story is a list of commands (requeue_player.c and requeue_real.py explain them). A player answers each; ``judge`` compares the answers with
the model and returns the first answer that is wrong. ``shrink`` drops commands as long as the story stays wrong.

The model knows what storage has, which versions were committed and never persisted on a node (leftovers), and what the present run has
saved. It allows every answer that the rules of docs/protocol.md allow, and no other:

* The newest is the last version that a run has committed, unless that only changed an earlier step of its line. A new run finds the
  newest durable one, or a leftover of its node.
* A tag is the last writing of the run, else the last one in storage, else a leftover of the node.
* All files of a version are of one history: its own, and those of the writing before it, without those of ranks that the run does not have.
* Retention removes what a run has found before what it has saved, and never what is pinned.
* Storage paths know nothing of each other: each has a model of its own.
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
PATHS = "AB"
OTHER_TAGS = ("last", "best")
WAYS = ("api", "manager", "lightning", "deepspeed")
UNWRITABLE = ("all", "unmounted", "read-only")  # faults


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
    """The state of one storage path, and the checks of a player's answers about it."""

    way: str = "api"
    node: str = "0"
    world: int = 1
    run: str = ""
    keep: int = 0
    kept: bool = False  # some run had a rule
    storage: dict[str, Writing] = field(default_factory=dict)
    leftovers: dict[str, list[Writing]] = field(default_factory=dict)  # by node
    maybe: list[Writing] = field(default_factory=list)  # leftovers that may have become durable
    removed: dict[str, list[Writing]] = field(default_factory=dict)  # by tag: removed by hand; memory may still have it
    saved: list[Writing] = field(default_factory=list)  # by the present run, in order
    found: set[str] = field(default_factory=set)  # tags that storage had when the run began
    pins: set[str] = field(default_factory=set)
    past: list[Writing] = field(default_factory=list)  # all that were durable once: a list that is stale may show them
    numbers: int = 0
    fault: str = "0"
    newest_is_open: bool = False  # the newest was removed by hand: what follows it is not modelled
    read_steps: list[tuple[int, int]] = field(default_factory=list)  # (number of writings at that time, step)
    is_late: bool = False  # the run has taken an answer while storage failed
    is_stale: bool = False  # the run has looked at lists that were stale
    latest: str = ""  # the tag that DeepSpeed's file says
    has_threads: bool = False  # agents persist when they like, so what a node has lost may be in storage

    # -- what the rules allow

    def _unsaved(self) -> list[Writing]:
        """The leftovers that this node may have."""
        own = self.leftovers.setdefault(self.node, [])
        if self.has_threads:
            own = [one for left in self.leftovers.values() for one in left if not self._is_overtaken(one)]
        return own + [one for one in self.maybe if one not in own]

    def _is_overtaken(self, writing: Writing) -> bool:
        """Returns True if storage has a later writing of the tag by the same run."""
        stored = self.storage.get(writing.tag)
        return stored is not None and stored.run == writing.run and stored.number > writing.number

    def _newest_of(self, writings: Iterable[Writing]) -> Writing | None:
        candidates = [one for one in writings if not one.amends]
        return max(candidates, key=lambda one: one.number, default=None)

    def newest(self) -> list[Writing]:
        if self.way == "deepspeed" and self.latest:
            named = self.of_tag(self.latest)
            return named if [one for one in named if one not in self._unsaved()] else [*named, *self._newest_of_job()]
        return self._newest_of_job()

    def _newest_of_job(self) -> list[Writing]:
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
        if answer.startswith("error") and word not in ("newest", "load", "steps"):
            return f"fails: {answer}"
        return getattr(self, f"_{word}")(answer, *rest)

    def _way(self, answer: str, name: str) -> None:
        self.way = name

    def _node(self, answer: str, node: str) -> None:
        self._leave()
        self.node = node

    def _leave(self) -> None:
        # The first version of an agent is due at once. With threads it may have become durable before a later writing of its tag.
        unsaved = [one for one in self.saved if not one.durable and (self._is_current(one) or (self.has_threads and not self._is_overtaken(one)))]
        self.leftovers.setdefault(self.node, []).extend(unsaved)
        self.saved, self.run = [], ""

    def _run(self, answer: str, name: str, keep: str, path: str, world: str) -> None:
        self.run, self.keep, self.world = name, int(keep), int(world)
        self.kept |= bool(self.keep)
        self.found = set(self.storage)
        self.read_steps, self.is_late, self.is_stale = [], False, self._is_stale()

    def _scan(self, answer: str) -> None:
        pass

    def _kill(self, answer: str) -> None:
        self._leave()

    def _forget(self, answer: str) -> None:
        self._leave()
        if not self.has_threads:
            self.leftovers[self.node] = []

    def _fault(self, answer: str, kind: str) -> None:
        self.fault = kind
        self.is_stale |= self._is_stale()

    def _is_stale(self) -> bool:
        return self.fault.startswith("stale-")

    def _is_disturbed(self) -> bool:
        return self.fault not in ("0", "read-only", "slow")

    def _end_count(self) -> None:
        """A search, or the worker, has met the failures of which only some were to come."""
        if self.fault.isdecimal():
            self.fault = "0"

    def _pin(self, answer: str, tag: str) -> None:
        self.pins.add(tag)

    def _unpin(self, answer: str, tag: str) -> None:
        self.pins.discard(tag)

    def _newest(self, answer: str) -> str | None:
        return self._check_found(answer, self.newest(), is_open=self.newest_is_open)

    def _load(self, answer: str, tag: str) -> str | None:
        return self._check_found(answer, self.of_tag(tag), is_open=False, tag=tag)

    def _check_found(self, answer: str, allowed: list[Writing], is_open: bool, tag: str = "") -> str | None:
        is_blind = self.fault in ("all", "unmounted") and not [one for one in self.saved if not tag or one.tag == tag]
        is_disturbed = self._is_disturbed()
        self._end_count()
        if answer.startswith("error"):
            return None if is_disturbed or "removed or written again" in answer else f"fails: {answer}"
        if answer == "none":
            certain = [one for one in allowed if one not in self._unsaved() and one not in self.removed.get(one.tag, [])]
            if self.is_stale or (tag and self.has_threads and self.kept):
                return None  # the list showed less, or retention may have acted since
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
        if self.is_stale and not any(one.tag == found and self._has(one, content) for one in allowed):
            allowed = [*self.past, *self._unsaved()]
            self.is_late = self.newest_is_open = True
        matching = [one for one in allowed if one.tag == found and (not tag or tag == found)]
        if not matching:
            return f"is {found}, and not {' or '.join(sorted({one.tag for one in allowed})) or 'none'}"
        if not any(self._has(one, content) for one in matching):
            return f"{found} has {content}, and not {' or '.join(str(one.contents) for one in matching)}"
        for one in matching:
            if self._has(one, content):
                self._note_read(found)
                if one.durable:
                    one.contents = [one_content for one_content in one.contents if self._shown(one_content) == content]
                break
        return None

    def _shown(self, content: dict[str, str]) -> dict[str, str]:
        """Lightning loads one file."""
        return {"x": content["x"]} if self.way == "lightning" else content

    def _has(self, writing: Writing, content: dict[str, str]) -> bool:
        return any(self._shown(one) == content for one in writing.contents)

    def _steps(self, answer: str) -> str | None:
        """Manager.all_steps()"""
        if answer.startswith("error"):
            return None if self._is_disturbed() else f"fails: {answer}"
        found = {f"global_step{step}" for step in answer.split(" ") if step}
        own = {one.tag for one in self.saved if self._is_current(one)}
        known = {*self.storage, *own, *(one.tag for one in self._unsaved()), *self.removed}
        missing = {*self.storage, *own} - found - set(self.removed)
        if self.kept or self._is_disturbed():  # retention may have acted since, or storage cannot be read
            missing -= set(self.storage)
        if missing:
            return f"{sorted(missing)} is not among the steps"
        return f"{sorted(found - known)} is among the steps" if found - known else None

    def _note_read(self, tag: str) -> None:
        if tag.startswith("global_step"):
            self.read_steps.append((self.numbers, int(tag[11:])))

    def _save(self, answer: str, tag: str, *files: str) -> None:
        own = self._of_world(dict(one.split("=") for one in files))
        self.numbers += 1
        before = [one for one in self.saved if one.tag == tag]
        bases = before[-1:] or self.of_tag(tag)
        contents = [{**self._of_world(content), **own} for base in bases for content in base.contents]
        if not before or (before[-1].durable and self.storage.get(tag) is not before[-1]):
            contents.append(own)  # until storage was compared, or since the writing before was removed by hand
        is_settled = not self.is_stale and all(base.is_settled for base in bases) and (not before or not before[-1].durable or self.storage.get(tag) is before[-1])
        writing = Writing(tag, self.run, self.numbers, own, contents, is_settled=is_settled and not self.removed.get(tag))
        head = self._newest_of(one for one in [*self.storage.values(), *self.saved, *self._unsaved()] if one.step is not None)
        if writing.step is not None and head is not None and head.step is not None and writing.step < head.step:
            reads_head = any(step >= head.step for _, step in self.read_steps)
            is_partial = any(set(self._of_world(base.contents[0])) - set(own) for base in bases if base.contents)
            went_back = any(step < head.step and at >= head.number for at, step in self.read_steps)
            writing.amends = (bool(before) and not went_back) or (is_partial and reads_head)
            if is_partial or (before and went_back):
                self.newest_is_open = True  # both is allowed: which one depends on what was read last, and when storage was compared
        if not writing.amends:
            self.newest_is_open = self.newest_is_open and writing.step is None
        if self.way == "lightning":
            writing.amends = self.newest_is_open = False  # the newest is the file that was saved last
        if self.is_stale:
            self.newest_is_open = True
        self.latest = tag
        self.saved.append(writing)

    def _of_world(self, content: dict[str, str]) -> dict[str, str]:
        """Leaves out the files of rank 1 if the run has one rank."""
        return {name: value for name, value in content.items() if self.world > 1 or name.islower()}

    def _persist(self, answer: str) -> str | None:
        self._end_count()
        if self.fault in UNWRITABLE:
            return None if set(answer.split(" ")) - {""} == set(self.storage) else "storage changed while it failed"
        written: list[Writing] = []
        for writing in [*self._unsaved(), *self.saved]:
            stored = self.storage.get(writing.tag)
            if writing.durable or writing in self.maybe:
                continue
            is_leftover = writing not in self.saved
            if is_leftover and (self.has_threads or (stored is not None and stored.run != writing.run and stored not in written)):
                self.maybe.append(writing)  # it gives way, or follows what its run had found
                continue
            if [one for one in self.saved if one.tag == writing.tag and one.number > writing.number]:
                continue
            if self.is_stale and stored is not None and stored.run != writing.run:
                self.maybe.append(writing)  # it gives way, because its run did not see what it would replace
                continue
            writing.durable = True
            written.append(writing)
            if writing.is_settled:
                writing.contents = [content for content in writing.contents if len(content) == max(map(len, writing.contents))]
            self.storage[writing.tag] = writing
            self.past.append(writing)
            self.removed.pop(writing.tag, None)
        self.leftovers = {node: [one for one in left if not one.durable] for node, left in self.leftovers.items()}
        if self.is_stale:
            self._set_aside(set(answer.split(" ")))
        return self._compare(set(answer.split(" ")) - {""})

    def _set_aside(self, tags: set[str]) -> None:
        """A version waits while the list does not show what its agent has to know. With a rule it may also have been removed."""
        for tag in set(self.storage) - tags:
            if self.storage[tag] in self.saved:
                writing = self.storage.pop(tag)
                writing.durable = bool(self.keep)
                self.maybe.append(writing)
                if self.keep:
                    self.removed.setdefault(tag, []).append(writing)

    def _prune(self, answer: str, tag: str) -> str | None:
        if tag in self.pins or self.fault in UNWRITABLE:
            return None if answer == "none" else f"removes {tag}, which is pinned, or storage cannot be written"
        if answer == "none" and self.has_threads:
            return None  # the command leaves the newest
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
        return None

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
            late[tag].contents = [content for one in self._unsaved() if one.tag == tag for content in one.contents]
            late[tag].durable = True
            self.storage[tag] = late[tag]
            self.past.append(late[tag])
            self.newest_is_open = True
        if gone and not self.keep and not (self.has_threads and self.kept):
            return f"{sorted(gone)} went, and nothing said so"
        if gone & self.pins:
            return f"{sorted(gone & self.pins)} went, which is pinned"
        saved = [one for one in self.saved if not one.amends and self._is_current(one) and one.durable]
        lost = [one.tag for one in saved if one.tag in gone]
        kept = [tag for tag in self.found & tags - self.pins if self.storage[tag] not in self.saved]
        if lost and kept and not self.is_late and not self.newest_is_open:
            return f"retention took {lost}, which the run has saved, and left {kept}, which it had found"
        if saved and saved[-1].tag in gone and not self.newest_is_open:
            return f"retention took {saved[-1].tag}, the newest"
        is_pruned = self.has_threads and self.newest_is_open  # retention may have decided before the removal by hand
        if gone and len(tags) < self.keep and not is_pruned:
            return f"retention left {sorted(tags)}, fewer than {self.keep}"
        for tag in gone:
            self.removed.setdefault(tag, []).append(self.storage.pop(tag))
        return None


class World:
    """The models of all storage paths."""

    def __init__(self, has_threads: bool) -> None:
        self._models = {path: Model(has_threads=has_threads) for path in PATHS}
        self._present = self._models[PATHS[0]]

    def apply(self, command: str, answer: str) -> str | None:
        """Applies a command and its answer. Returns why the answer is wrong; None: it is right."""
        word, *rest = command.split(" ")
        if word == "run":
            for model in self._models.values():
                model._leave()
            self._present = self._models[rest[2]]
        if word in ("way", "node", "kill", "forget", "fault"):
            return next(filter(None, [model.apply(command, answer) for model in self._models.values()]), None)
        return self._present.apply(command, answer)


def judge(story: Story, answers: list[str], has_threads: bool = False) -> str | None:
    """Returns the first wrong answer of a player, with the command; None: all are right."""
    world = World(has_threads)
    for command, answer in zip(story, answers, strict=True):
        problem = world.apply(command, answer)
        if problem:
            return f"{command}: {problem}"
    return None


@dataclass
class Writer:
    """Writes one story. ``is_left``: a run may be left with versions that are not durable, without a kill."""

    dice: random.Random
    faults: Sequence[str]
    is_left: bool
    way: str
    value: int = 0
    runs: int = 0
    steps: dict[str, int] = field(default_factory=dict)  # by path
    tags: dict[str, list[str]] = field(default_factory=dict)
    knows: set[tuple[str, str]] = field(default_factory=set)  # (node, path): an agent there has seen that the path is below a mount
    story: Story = field(default_factory=list)

    def write(self, length: int) -> Story:
        paths = self.dice.choice(["A", "A", PATHS])
        worlds = self.dice.choice([[1], [1], [1, 2]]) if self.way == "api" else [1]
        pins = self.dice.random() < 0.3
        if self.way != "api":
            self.story.append(f"way {self.way}")
        while len(self.story) < length:
            self._run(self.dice.choice(NODES), self.dice.choice(paths), self.dice.choice(worlds), pins)
        for path in paths:
            for node in NODES:
                self._begin(node, 0, path, worlds[0])
                self.story += ["newest", *(f"load {tag}" for tag in dict.fromkeys(self.tags.get(path, [])[-3:]))]
        return self.story

    def _begin(self, node: str, keep: int, path: str, world: int) -> None:
        self.runs += 1
        self.story += [f"node {node}", f"run r{self.runs} {keep} {path} {world}"]

    def _run(self, node: str, path: str, world: int, pins: bool) -> None:
        dice, tags = self.dice, self.tags.setdefault(path, [])
        self._begin(node, 0 if self.way == "lightning" else dice.choice([0, 0, 0, 2, 3]), path, world)
        if self.way == "api" and dice.random() < 0.3:
            self.story.append("scan")
        fault = dice.choice(self.faults) if self.faults and dice.random() < 0.25 else ""
        if fault == "unmounted" and (node, path) not in self.knows:
            fault = ""
        if fault:
            self.story.append(f"fault {fault}")
        self._look(tags)
        is_brief = dice.random() < 0.6 or fault.isdecimal()
        if fault and is_brief:
            self.story.append("fault 0")
        for _ in range(dice.randrange(4)):
            self._save(path, tags, world)
            if dice.random() < 0.3:
                self._look(tags)
            if dice.random() < 0.4:
                self.story.append("persist")
        if fault and not is_brief:
            self.story.append("fault 0")
        if tags and self.way != "lightning" and dice.random() < 0.1:
            self.story.append(f"prune {dice.choice(tags)}")
        if tags and pins and dice.random() < 0.5:
            self.story.append(f"{dice.choice(['pin', 'pin', 'unpin'])} {dice.choice(tags)}")
        ends = [["persist"], ["persist"], ["persist", "kill"], ["kill"], ["persist", "forget"], ["forget"], []]
        end = dice.choice(ends if self.is_left else ends[:-1])
        self.story += end
        if end in (["persist"], []):
            self.knows |= {(node, path)} if end else set()
        else:
            self.knows -= {(node, one) for one in PATHS}

    def _look(self, tags: list[str]) -> None:
        looks = ["newest", "newest", "newest", *([f"load {self.dice.choice(tags)}"] if tags else []), ""]
        looks += ["steps"] if self.way == "manager" else []
        self.story += filter(None, [self.dice.choice(looks)])

    def _save(self, path: str, tags: list[str], world: int) -> None:
        dice, kind, step = self.dice, self.dice.random(), self.steps.get(path, 0)
        if kind < 0.55 or (self.way != "api" and (kind >= 0.7 or step < 2)):
            step += 1
            tag = f"global_step{step}"
        elif kind < 0.7 and step > 1:
            step = dice.randrange(1, step)
            tag = f"global_step{step}"
        else:
            tag = dice.choice(OTHER_TAGS)
        self.steps[path] = step
        files = dice.choice(["xy", "xy", "x", "y"]) if self.way == "api" else "x" if self.way == "lightning" else "xy"
        files += dice.choice(["XY", "XY", "X", "Y"]) if world > 1 else ""
        values = []
        for name in files:
            self.value += 1
            values.append(f"{name}={self.value}")
        self.story.append(f"save {tag} {' '.join(values)}")
        tags.append(tag)


def write(seed: int, length: int = 14, faults: Sequence[str] = (), is_left: bool = True, way: str = WAYS[0]) -> Story:
    """Returns a story: runs on nodes in turn, each looks, saves, becomes durable, and ends in one of several manners.

    faults: those that happen. way: in which the job uses Nebula.
    """
    return Writer(random.Random(seed), faults, is_left, way).write(length)


def _is_sound(story: Story) -> bool:
    is_running = False
    if "steps" in story and "way manager" not in story:
        return False
    for command in story:
        word = command.split(" ")[0]
        if word in ("node", "kill", "forget", "run"):
            is_running = word == "run"
        elif word not in ("way", "fault") and not is_running:
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
    """Plays stories on agents without threads, in one process (requeue_player.c).

    store: "file"; "mem" for the objects of the reference driver; "late" for these with lists that are not always fresh.
    """

    def __init__(self, program: Path, store: str = "file") -> None:
        environment = os.environ | {"NEBULA_TEST_STORE": "file" if store == "file" else "mem"}
        # those that the player can make; "all" is rare, because each search then waits for seconds
        some = {"file": ["1", "1", "2", "read-only"], "mem": ["1"] * 4, "late": ["1", "stale-1", "stale-4", "stale-12"]}[store]
        self.faults = [*some, *some, "all"]
        self._player = subprocess.Popen([program, store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

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
    lines, model = [], World(has_threads)
    for command, answer in zip(story, answers, strict=True):
        problem = model.apply(command, answer)
        lines.append(f"{command:30} {answer}" + (f"     <- {problem}" if problem else ""))
        if problem:
            break
    return re.sub(r" +\n", "\n", "\n".join(lines))
