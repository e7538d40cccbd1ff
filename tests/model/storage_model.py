"""Storage that is written once and committed by condition, as a small state machine, explored exhaustively.

One tag and one file. Writers of two runs put the file and commit it; removers (retention, prune, sweeps) take versions away.
Every process may sleep before each of its steps for any time, die there, or not receive the answer of a write that was
done. The store has two conditions: create an object if its name is free, and remove an object if it still has the stamp that
the caller saw. No decision depends on a clock or a lock.

The objects of a tag in storage:

    x            the file under its own name, for the first writer that finds the name free
    own-<w>      the file under a name of writing w, for every other writer
    manifest-<n> the n-th entry of the tag's log, created and never replaced: a version (writing, key of its file) or a removal
    removed      beside the tag: the largest number that a finished removal has used

A writer reads the newest entry n, puts its file, and creates entry n + 1. Its first attempt may take the tag for a new one without a look. If that name is taken it reads the log again. It gives way to a
version of a run that its own run did not come after. If a removal was entered since it put its file, it puts the file again,
under another writing. It calls the version durable after a last look at the file.

A remover notes what it sees, reads `removed`, creates the next entry as a removal, removes what it saw, writes the number of its entry to
`removed`, and then removes the entries, its own last. An entry whose number is not above `removed` is dead: a writer that finds its own entry
dead takes it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import search


@dataclass(frozen=True)
class Rules:
    """The protocol, and the mistakes that the model must find."""

    create_if_free: bool = True  # else: an entry of the log replaces one of its number
    put_if_free: bool = True  # else: the file replaces an object with its name
    gives_way: bool = True  # else: a writer commits over any run
    removal_is_entered: bool = True  # else: a remover removes objects without an entry
    again_after_removal: bool = True  # else: a writer trusts the file that it put before a removal
    last_look: bool = True  # else: a version is called durable without a look at its file
    remove_if_seen: bool = True  # else: a removal ignores the stamp
    numbers_go_on: bool = True  # else: an empty log begins at 1
    log_before_number: bool = True  # else: a remover reads `removed` before the log
    answers_get_lost: bool = True  # not a rule: the behaviour of the store


@dataclass(frozen=True)
class Writer:
    at: str = "begin"
    attempt: int = 0  # each has another writing
    base: int = 0  # the newest entry that it knows
    key: str = ""  # the key of its file


@dataclass(frozen=True)
class Remover:
    at: str = "look"
    seen: frozenset[tuple[str, str]] = frozenset()  # objects: (key, stamp)
    entries: frozenset[tuple[int, str]] = frozenset()  # (number, stamp)
    number: int = 0  # of its own entry


# An entry: number, stamp, key of the file; "" for a removal.
Entry = tuple[int, str, str]


@dataclass(frozen=True)
class State:
    writers: tuple[Writer, ...]
    removers: tuple[Remover, ...]
    objects: frozenset[tuple[str, str]] = frozenset()
    log: frozenset[Entry] = frozenset()
    removed: int = 0
    meant: frozenset[str] = frozenset()  # writings with a removal entry that followed the rules
    durable: frozenset[str] = frozenset()


NAMES = "ab"  # the writers; b's run came after a's, or neither after the other
ATTEMPTS = 2


def newest(state: State) -> Entry:
    return max(state.log, default=(0, "", ""))


def stamp(index: int, writer: Writer) -> str:
    return f"{NAMES[index]}{writer.attempt}"


def has(state: State, key: str) -> str | None:
    return next((by for name, by in state.objects if name == key), None)


def create(state: State, entry: Entry, rules: Rules) -> State | None:
    """Creates an entry. None: the number is taken."""
    if any(number == entry[0] for number, _, _ in state.log):
        if rules.create_if_free:
            return None
        state = replace(state, log=frozenset(one for one in state.log if one[0] != entry[0]))
    return replace(state, log=state.log | {entry})


def put(state: State, key: str, by: str, rules: Rules) -> State | None:
    if has(state, key) is not None:
        if rules.put_if_free:
            return None
        state = replace(state, objects=frozenset(one for one in state.objects if one[0] != key))
    return replace(state, objects=state.objects | {(key, by)})


def may_follow(index: int, by: str, related: bool) -> bool:
    """Returns whether a writer's run may commit over a version of run `by`: its own run, or one that its run came after."""
    return by[0] == NAMES[index] or (related and index == 1)


def write_steps(state: State, index: int, rules: Rules, related: bool) -> Iterator[tuple[str, State]]:
    writer = state.writers[index]
    me = stamp(index, writer)

    def at(where: str, after: State = state, **more: object) -> State:
        writers = list(state.writers)
        writers[index] = replace(writer, at=where, **more)  # type: ignore[arg-type]
        return replace(after, writers=tuple(writers))

    def again() -> State:
        if writer.attempt + 1 == ATTEMPTS:
            return at("gave up")
        return at("begin", attempt=writer.attempt + 1, key="")

    number, by, key = newest(state)
    if writer.at == "begin" and not writer.attempt:
        yield f"{me} takes the tag for a new one", at("put", base=0)
    if writer.at in ("begin", "look"):
        base = max(number, state.removed) if rules.numbers_go_on else number
        if key and by == me:
            yield f"{me} finds its own entry", at("check", base=number)
        elif key and rules.gives_way and not may_follow(index, by, related):
            yield f"{me} gives way to {by}", at("gave way")
        elif writer.at == "begin":
            yield f"{me} reads entry {base}", at("put", base=base)
        elif rules.again_after_removal and any(one[0] > writer.base and not one[2] for one in state.log):
            yield f"{me} sees a removal and begins anew", again()
        elif number == writer.base:  # the entry that took the name has been removed since
            yield f"{me} begins anew", again()
        else:
            yield f"{me} reads entry {base}", at("commit", base=base)
    elif writer.at == "put":
        for name in ("x", f"own-{me}"):
            after = put(state, name, me, rules)
            if after:
                yield f"{me} puts {name}", at("commit", after, key=name)
                if rules.answers_get_lost:
                    yield f"{me} puts {name} and hears no answer", at("put again", after)
                break
    elif writer.at == "put again":
        # Another writer may have the plain name. The name of its own writing can only be its own.
        name = f"own-{me}"
        yield f"{me} puts {name}", at("commit", put(state, name, me, rules) or state, key=name)
    elif writer.at == "commit":
        after = create(state, (writer.base + 1, me, writer.key), rules)
        if after:
            yield f"{me} creates entry {writer.base + 1}", at("check", after)
            if rules.answers_get_lost:
                yield f"{me} creates entry {writer.base + 1} and hears no answer", at("look", after)
        else:
            yield f"{me} finds entry {writer.base + 1} taken", at("look")
    elif writer.at == "check":
        mine = next((one for one in state.log if one[1] == me), None)
        is_dead = rules.numbers_go_on and mine and mine[0] <= state.removed
        if mine and not key and rules.again_after_removal:
            yield f"{me} finds a removal after its entry", at("gone")
        elif not rules.last_look or (mine and not is_dead and has(state, mine[2]) == me):
            yield f"{me} is durable", at("done", replace(state, durable=state.durable | {me}))
        elif mine:
            log = frozenset(one for one in state.log if one != mine)
            yield f"{me} takes its entry back", replace(again(), log=log)
        else:
            yield f"{me} is gone", at("gone")


def remove_steps(state: State, index: int, rules: Rules) -> Iterator[tuple[str, State]]:
    remover = state.removers[index]

    def at(where: str, after: State = state, **more: object) -> State:
        removers = list(state.removers)
        removers[index] = replace(remover, at=where, **more)  # type: ignore[arg-type]
        return replace(after, removers=tuple(removers))

    number = newest(state)[0]
    name = f"remover {index}"
    entries = frozenset((one[0], one[1]) for one in state.log)
    if remover.at == "look" and (state.log or state.objects):
        if rules.log_before_number:
            yield f"{name} looks", at("number", seen=state.objects, entries=entries, number=number)
        else:
            yield f"{name} reads {state.removed}", at("number", number=state.removed)
    elif remover.at == "number":
        if rules.log_before_number:
            base = max(remover.number, state.removed) if rules.numbers_go_on else remover.number
            yield f"{name} reads {state.removed}", at("enter", number=base + 1)
        else:
            base = max(number, remover.number)
            yield f"{name} looks", at("enter", seen=state.objects, entries=entries, number=base + 1)
    elif remover.at == "enter":
        meant = state.meant | {one[1] for one in remover.entries}
        if not rules.removal_is_entered:
            yield f"{name} begins", at("remove", replace(state, meant=meant))
            return
        after = create(state, (remover.number, f"r{index}", ""), rules)
        if after:
            yield (
                f"{name} enters a removal",
                at("remove", replace(after, meant=meant), entries=remover.entries | {(remover.number, f"r{index}")}),
            )
        else:
            yield f"{name} gives way", at("done")
    elif remover.at == "remove":
        names = {one[0] for one in remover.seen}
        gone = remover.seen if rules.remove_if_seen else {one for one in state.objects if one[0] in names}
        # A batch may end in the middle. The next step or the next remover removes the rest.
        for some in {frozenset(gone), *(frozenset({one}) for one in gone)}:
            if some & state.objects:
                yield f"{name} removes {sorted(some)}", at("remove", replace(state, objects=state.objects - some))
        if not gone & state.objects:
            yield (
                f"{name} notes {remover.number}",
                at("drop", replace(state, removed=max(state.removed, remover.number))),
            )
    elif remover.at == "drop":
        left = sorted(remover.entries)
        if not left:
            yield f"{name} has ended", at("done")
            return
        first, of = left[0]
        log = frozenset(one for one in state.log if one[0] != first or (rules.remove_if_seen and one[1] != of))
        yield (
            f"{name} removes entry {first}",
            at("drop", replace(state, log=log), entries=remover.entries - {(first, of)}),
        )


def steps(state: State, rules: Rules, related: bool) -> Iterator[tuple[str, State]]:
    for index in range(len(state.writers)):
        yield from write_steps(state, index, rules, related)
    for index in range(len(state.removers)):
        yield from remove_steps(state, index, rules)


def broken(state: State, related: bool) -> str | None:
    """Returns the broken promise. None: all hold."""
    number, by, key = newest(state)
    for one in state.durable - state.meant:
        index = NAMES.index(one[0])
        if not key:
            return f"{one} was durable, nobody removed it, and the log ends with {number, by or 'nothing'}"
        if by != one and not may_follow(NAMES.index(by[0]), one, related):
            return f"{by} has replaced {one}, which was durable, of a run that it did not come after"
        if by == one and has(state, key) != one:
            return f"{one} is durable, and its file is {has(state, key)}"
        if by[0] == one[0] and by < one and index == 1:
            return f"{by} has replaced {one}"
    return None


def explore(
    rules: Rules, *, related: bool = True, writers: int = 2, removers: int = 1
) -> tuple[int, str | None, list[str]]:
    """Explores every reachable state. Returns (number of states, first broken promise or None, the steps that lead to it)."""
    first = State((Writer(),) * writers, (Remover(),) * removers)
    return search.explore(first, lambda state: steps(state, rules, related), lambda state: broken(state, related))
