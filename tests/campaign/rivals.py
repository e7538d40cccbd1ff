"""Stories of runs of one job that live at the same time, each on a node of its own, and what storage and each of them may have then.

requeue_player.c plays them. After each ``persist`` an observer, a new run on a node without memory, loads every tag. ``judge`` compares with the
rules of docs/protocol.md ("Runs that write the same tags"):

* A run replaces a version of another run only if it came after that run, and then carries its files over. Else its own version gives way.
* No tag is ever a mixture of two runs that do not follow one another.
* Retention removes no version of a run that goes on beside its own.
* A run loads its own writing of a tag. Where it has none, it loads what storage has, or what its node has kept.

The rules leave some answers open: a partial save whose base another run has replaced, what retention has removed before it was durable, which of
two rivals has the newest version. Both answers are right there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

from requeue import Story

OBSERVER = "3"
FILES = "xy"
Content = dict[str, str]


def write(seed: int, length: int = 12) -> Story:
    """Returns a story of three nodes. A node's run goes on when another node has its turn."""
    return _Writer(random.Random(seed)).write(length)


@dataclass
class _Writer:
    dice: random.Random
    story: Story = field(default_factory=list)
    node: str = ""
    value: int = 0
    runs: int = 0
    steps: dict[str, int] = field(default_factory=dict)  # by node with a run
    tags: list[str] = field(default_factory=list)

    def write(self, length: int) -> Story:
        for _ in range(length):
            node = self.dice.choice("012")
            if node != self.node:
                self.story.append(f"node {node}")
                self.node = node
            if node not in self.steps or self.dice.random() < 0.15:
                self._begin()
            for _ in range(self.dice.randrange(1, 3)):
                self._act()
        return self.story

    def _begin(self) -> None:
        if self.node in self.steps and self.dice.random() < 0.5:
            self.story.append(self.dice.choice(["kill", "forget"]))
        newest = max((int(tag[11:]) for tag in self.tags if tag.startswith("global_step")), default=0)
        self.steps[self.node] = newest if self.dice.random() < 0.8 else 0
        self.runs += 1
        self.story += [f"run r{self.runs} {self.dice.choice([0, 0, 2, 3])} A 1", "scan"]  # an agent looks at storage at once
        if self.dice.random() < 0.6:
            self.story.append("newest")

    def _act(self) -> None:
        kind = self.dice.random()
        if kind < 0.45:
            self._save()
        elif kind < 0.75:
            self.story += ["persist", *self._observe()]
        elif kind < 0.87:
            self.story.append("newest")
        elif self.tags:
            self.story.append(f"load {self.dice.choice(self.tags)}")

    def _save(self) -> None:
        if self.dice.random() < 0.7:
            self.steps[self.node] += 1
            tag = f"global_step{self.steps[self.node]}"
        else:
            tag = self.dice.choice(["last", "best"])
        values = []
        for name in self.dice.choice(["xy", "xy", "x", "y"]):
            self.value += 1
            values.append(f"{name}={self.value}")
        self.story.append(f"save {tag} {' '.join(values)}")
        if tag not in self.tags:
            self.tags.append(tag)

    def _observe(self) -> Story:
        return [f"node {OBSERVER}", "run observer 0 A 1", *(f"load {tag}" for tag in self.tags), "forget", f"node {self.node}"]


@dataclass
class Writing:
    """One writing of a tag. ``contents``: the files that it may have."""

    tag: str
    run: str
    agent: tuple[str, int]  # node, and number of its agent
    number: int
    own: Content
    contents: list[Content]
    is_durable: bool = False
    gave_way: bool = False

    def is_in(self, content: Content) -> bool:
        return self.own.items() <= content.items()


@dataclass
class Run:
    """A run that lives. ``follows``: (run, moment): it came after what that run had committed by then; ``may_follow``: both is right."""

    name: str
    begun: int
    keep: int
    follows: dict[str, int] = field(default_factory=dict)
    may_follow: dict[str, int] = field(default_factory=dict)
    saved: list[Writing] = field(default_factory=list)

    def of_tag(self, tag: str) -> Writing | None:
        return next((one for one in reversed(self.saved) if one.tag == tag), None)


class World:
    """Storage and nodes, by the answers so far."""

    def __init__(self) -> None:
        self.now = 0
        self.node = ""
        self.storage: dict[str, tuple[Writing, Content]] = {}
        self.live: dict[str, Run] = {}  # by node
        self.agents: dict[str, int] = {}
        self.leftovers: dict[str, list[Writing]] = {}
        self.known: list[Writing] = []
        self.listed: set[str] = set()  # the tags after a persist, which the observer is to load
        self.seen: dict[str, Content] = {}
        self.persisted_by = ""

    def apply(self, command: str, answer: str) -> str | None:
        """Applies a command and its answer. Returns why the answer is wrong; None: it is right."""
        self.now += 1
        word, *rest = command.split(" ")
        if self.node == OBSERVER:
            return self._observed(word, rest, answer)
        if answer.startswith("error") and word not in ("load", "newest"):
            return f"fails: {answer}"
        check = getattr(self, f"_{word}")(answer, *rest)
        return None if check is None else str(check)

    # -- runs and agents

    @property
    def run(self) -> Run:
        return self.live[self.node]

    def _agent(self) -> tuple[str, int]:
        return self.node, self.agents.setdefault(self.node, 0)

    def _in_memory(self) -> list[Writing]:
        return [one for one in self.known if one.agent == self._agent()]

    def _kept(self) -> list[Writing]:
        """Versions that this node has written and may still have in memory: a run compares them with storage when it begins."""
        return [one for one in self.known if one.agent[0] == self.node and one.is_durable]

    def _left(self, tag: str | None = None) -> list[Writing]:
        return [one for one in self.leftovers.get(self.node, []) if tag in (None, one.tag) and not one.is_durable and not one.gave_way]

    def _node(self, answer: str, node: str) -> None:
        if node == OBSERVER:
            self.persisted_by, self.seen = self.node, {}
        self.node = node

    def _run(self, answer: str, name: str, keep: str, path: str, world: str) -> None:
        self._leave()
        run = self.live[self.node] = Run(name, self.now, int(keep))
        run.follows = {one.run: self.now for one in [*(stored for stored, _ in self.storage.values()), *self._left()]}
        run.may_follow = {one.run: self.now for one in self._in_memory()}

    def _scan(self, answer: str) -> None:
        pass

    def _leave(self) -> None:
        run = self.live.pop(self.node, None)
        if run:
            last = {one.tag: one for one in run.saved}
            self.leftovers.setdefault(self.node, []).extend(one for one in last.values() if not one.is_durable)

    def _kill(self, answer: str) -> None:
        self._leave()
        self.agents[self.node] = self.agents.get(self.node, 0) + 1

    def _forget(self, answer: str) -> None:
        self._kill(answer)
        self.leftovers[self.node] = []

    def _covers(self, other: Writing) -> bool | None:
        """Whether the run may replace that version; None: it may, or not."""
        run = self.run
        if other.run == run.name or run.follows.get(other.run, 0) >= other.number:
            return True
        return None if other.agent == self._agent() or run.may_follow.get(other.run, 0) >= other.number else False

    # -- saves

    def _save(self, answer: str, tag: str, *files: str) -> None:
        run, own = self.run, dict(one.split("=") for one in files)
        before, contents = run.of_tag(tag), [own]
        if tag in self.storage and self._covers(self.storage[tag][0]) is not False:
            contents.append({**self.storage[tag][1], **own})
        for base in [*([before] if before else []), *self._left(tag)]:
            contents += [{**content, **own} for content in base.contents]
        writing = Writing(tag, run.name, self._agent(), self.now, own, contents)
        run.saved.append(writing)
        self.known.append(writing)

    def _persist(self, answer: str) -> None:
        self.listed = set(answer.split(" ")) - {""}

    def _observed(self, word: str, rest: list[str], answer: str) -> str | None:
        if word == "node":
            self.node = self.persisted_by
            problem = self._compare()
            self.node = rest[0]
            return problem
        if word == "load" and answer != "none":
            if answer.startswith("error") or "=-1" in answer:
                return f"the observer cannot load it: {answer}"
            self.seen[rest[0]] = dict(one.split("=") for one in answer.split(" ")[2:])
        return None

    def _compare(self) -> str | None:
        """Compares what the observer has seen after a persist with what may have become durable."""
        if set(self.seen) != self.listed:
            return f"the observer loads {sorted(self.seen)}, and the list has {sorted(self.listed)}"
        for tag in sorted({*self.storage, *self.seen, *(one.tag for one in self.run.saved)}):
            problem = self._compare_tag(tag)
            if problem:
                return f"{tag} {problem}"
        return None

    def _compare_tag(self, tag: str) -> str | None:
        run, content = self.run, self.seen.get(tag)
        own, (stored, before) = run.of_tag(tag), self.storage.get(tag, (None, {}))
        covers = stored is None or self._covers(stored)
        if covers and stored is not None and own is not None and own.number < stored.number:
            covers = None  # the run has saved it before it came after the other one
        waits = own is not None and not own.is_durable and not own.gave_way
        is_whole = own is not None and set(own.own) == set(FILES)
        if content is None or (stored is not None and content == before):
            if waits and is_whole and covers is True and not run.keep:
                return f"of {run.name} is not durable"
            if content is None and stored is not None and (not run.keep or covers is False):
                return f"of {stored.run} was removed, and {run.name} has no rule for it"
            if content is None:
                self.storage.pop(tag, None)
            elif own is not None and covers is False:
                own.gave_way = True
            return None
        pending = [*self._left(tag), *([own] if own is not None and waits else [])]
        writing = max((one for one in pending if one.is_in(content)), key=lambda one: one.number, default=None)
        if writing is None:
            return f"has {content}, which is of no version that waited; it had {before}"
        if stored is not None and writing is own and covers is False:
            return f"of {run.name} replaced that of {stored.run}, after which it did not come"
        if stored is not None and writing is not own and stored.run != writing.run and stored.number > writing.number:
            return f"that {writing.run} has left replaced the later one of {stored.run}"
        if content not in [*writing.contents, *([{**before, **writing.own}] if covers is not False else [])]:
            return f"is a mixture: {content}"
        writing.is_durable, writing.contents = True, [content]
        self.storage[tag] = writing, content
        return None

    # -- loads

    def _load(self, answer: str, tag: str) -> str | None:
        run, own, stored = self.run, self.run.of_tag(tag), self.storage.get(tag)
        is_certain = own is not None and set(own.own) == set(FILES) and not own.gave_way and not run.keep and (not own.is_durable or (stored and stored[0] is own))
        if answer == "none" or answer.startswith("error"):
            if is_certain:
                return f"is lost for {run.name}, which has saved it"
            return "is not found, and storage has it" if stored and own is None and answer == "none" else None
        allowed = [own] if own is not None else [*self._left(tag), *(one for one in self._kept() if one.tag == tag)]
        if stored and not (is_certain and own is not None and not own.is_durable):
            allowed.append(stored[0])
        return self._check(answer, [one for one in allowed if one is not None])

    def _newest(self, answer: str) -> str | None:
        run = self.run
        own = [one for one in run.saved if run.of_tag(one.tag) is one]
        if answer == "none" or answer.startswith("error"):
            return f"{answer}, and storage has {sorted(self.storage)}" if self.storage and answer == "none" else None
        stored = [one for one, _ in self.storage.values()]
        return self._check(answer, [*own, *stored, *self._left(), *self._kept()])

    def _check(self, answer: str, allowed: list[Writing]) -> str | None:
        """Whether the answer is one of these, with files of its own history."""
        tag, _, *files = answer.split(" ")
        content = dict(one.split("=") for one in files)
        stored = self.storage.get(tag)
        for one in allowed:
            partial = set(one.own) != set(FILES)
            if one.tag == tag and partial and one.is_in({**content, **{name: "-1" for name in one.own if name not in content}}) and "-1" in content.values():
                return None  # the version from which it has a file is not there any more
            contents = [*one.contents, *([{**stored[1], **one.own}] if stored and one.run == self.run.name else [])]
            if one.tag == tag and (content in contents or (stored and stored[0] is one and content == stored[1])):
                if one.run != self.run.name:
                    self.run.follows[one.run] = max(self.run.follows.get(one.run, 0), self.now)
                return None
        return f"is {tag} with {content}, and not one of {[(one.tag, one.run, one.contents) for one in allowed]}"


def judge(story: Story, answers: list[str]) -> str | None:
    """Returns the first wrong answer of a player, with the command; None: all are right."""
    world = World()
    for command, answer in zip(story, answers, strict=True):
        problem = world.apply(command, answer)
        if problem:
            return f"{command}: {problem}"
    return None


def _blocks(story: Story) -> list[Story]:
    """The commands that go together: a persist with its observer, a run with its first look."""
    blocks, commands = [], iter(story)
    for command in commands:
        block = [command]
        while command == "persist" and block[-2:-1] != ["forget"]:
            block.append(next(commands))
        if command.startswith("run "):
            block.append(next(commands))
        blocks.append(block)
    return blocks


def _is_sound(blocks: list[Story]) -> bool:
    node, live = "", set[str]()
    for block in blocks:
        word = block[0].split(" ")[0]
        if word == "node":
            node = block[0]
        elif word == "run":
            live.add(node)
        elif node not in live or (block[0] == "persist" and block[-1] != node):
            return False
        elif word in ("kill", "forget"):
            live.remove(node)
    return True


def shrink(story: Story, is_wrong: Callable[[Story], bool]) -> Story:
    """Drops commands as long as the story stays wrong."""
    blocks = _blocks(story)
    for size in (8, 4, 2, 1):
        at = 0
        while at < len(blocks):
            shorter = blocks[:at] + blocks[at + size :]
            if shorter and _is_sound(shorter) and is_wrong(list(chain(*shorter))):
                blocks = shorter
            else:
                at += size
    return list(chain(*blocks))


def explain(story: Story, answers: list[str]) -> str:
    """Returns the story with its answers, up to the wrong one."""
    lines, world = [], World()
    for command, answer in zip(story, answers, strict=True):
        problem = world.apply(command, answer)
        lines.append(f"{command:30} {answer}".rstrip() + (f"     <- {problem}" if problem else ""))
        if problem:
            break
    return "\n".join(lines)
