"""How many requests an object store gets: for a save, for a resume and for a list. The figures are bounds, and not times."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator

import fork_server
import nebulaml
import pytest
import torch
from nebulaml._session import locate
from sinks import Sink, make_versions
from trainers import IMPORTS
from waiting import until

PATH = "s3://training/run"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sink]:
    made = Sink(monkeypatch)
    yield made
    made.close()


def nebula(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = os.environ.get("NEBULA_AGENT_PATH") or str(locate.agent_path())
    return subprocess.run([command, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def kinds(requests: list[str]) -> list[str]:
    """The requests without the names of this run: "PUT global_step2/model.pt", "LIST global_step2/"."""
    found = []
    for request in requests:
        method, target = request.split(" ")
        listed = re.search(r"list-type=2&prefix=run%2F([^&]*)", target)
        key = listed[1].replace("%2F", "/") if listed else target.removeprefix("/training/run/")
        key = re.sub(r"index/job-[^/]*/run-[^/]*/([^/]+)/[^/]+", r"index/\1", re.sub(r"w[0-9a-f]{16}-\d+-[0-9a-f]{8}", "W", key))
        found.append(f"{'LIST' if listed else method} {key}")
    return found


def save(step: int, *sizes: int) -> None:
    with nebulaml.Checkpoint(f"global_step{step}") as checkpoint:
        for at, size in enumerate(sizes):
            checkpoint.save(f"{at}.pt", torch.full((size,), float(step)))
    checkpoint.wait("durable", 60)


def asked(bucket: Sink, *last: str) -> list[str]:
    """The requests until one that begins with each of `last` was there. `latest` and the settings follow after the version is durable."""
    said: list[str] = []

    def is_over() -> bool:
        said.extend(kinds(bucket.requests()))
        return all(any(one.startswith(wanted) for one in said) for wanted in last)

    until(is_over, 60, f"{last} after {said}")
    return said


def test_a_save_of_a_small_file_takes_eight_requests(bucket):
    nebulaml.init(PATH, 0, 2, on_error="raise")
    save(1, 10)  # pays for the look at the path
    asked(bucket, "PUT latest", "PUT .nebula/settings-")
    for step in (2, 3):
        save(step, 10)
        said = asked(bucket, "PUT latest")
        tag = f"global_step{step}"
        assert set(said[:2]) == {f"PUT {tag}/.nebula/W.record-00000.json", f"LIST {tag}/"}, "before the file, together"
        assert said[2:4] == [f"PUT {tag}/0.pt", f"PUT {tag}/.nebula/manifest-1.json"]
        after = {f"LIST {tag}/", f"LIST .nebula/removed/{tag}/", f"PUT .nebula/index/{tag}"}
        assert set(said[4:7]) == after, "the last look, and the entry of the index"
        assert said[7:] == ["PUT latest"]


def manifests(requests: list[str]) -> list[str]:
    return [one for one in kinds(requests) if one.startswith("GET") and "/manifest-" in one]


@pytest.mark.parametrize("count", [1, 1010])
def test_a_resume_on_a_new_node_takes_six_requests_and_one_list_at_any_number_of_versions(bucket, count):
    """With the agent's look at the path in the background, which takes the list and the manifest of the search. Its last request is for `latest`."""
    make_versions(PATH, count)
    bucket.requests()
    nebulaml.init(PATH, 0, 2, on_error="raise")
    said: list[str] = []

    def is_over() -> bool:
        said.extend(bucket.requests())
        return "GET latest" in kinds(said)

    newest = nebulaml.get_latest_checkpoint()
    assert newest is not None and newest.tag == f"global_step{count}"
    until(is_over, 60, "the agent has looked at the path")
    assert manifests(said) == [f"GET global_step{count}/.nebula/manifest-1.json"]
    pages = [one for one in kinds(said) if one in ("LIST ", "LIST .nebula/index/")]
    assert len(pages) == 2 * (1 + count // 1000), "the index and the tags"
    assert len(said) - len(pages) == 6, kinds(said)
    assert f'"storage_count": {count},' in nebula("status", "--path", PATH, "--json").stdout, "the agent knows them"


@pytest.mark.nightly("test_a_resume_on_a_new_node_takes_six_requests_and_one_list_at_any_number_of_versions")
@pytest.mark.parametrize(("count", "most"), [(1010, 10), *([(10_000, 30)] if os.environ.get("NEBULA_TEST_NIGHTLY") else [])])
def test_a_list_of_many_versions_reads_only_the_manifest_of_the_newest(bucket, count, most):
    make_versions(PATH, count)
    bucket.requests()
    listed = nebula("list", "--path", PATH, "--json")
    said = bucket.requests()
    assert listed.returncode == 0 and len(manifests(said)) == 1
    assert len(said) <= most, kinds(said)


def test_each_further_file_of_less_than_a_mebibyte_takes_one_request(bucket):
    nebulaml.init(PATH, 0, 2, on_error="raise")
    save(1, 10)
    asked(bucket, "PUT latest", "PUT .nebula/settings-")
    save(2, 10, 1000, 100_000, 250_000)
    said = asked(bucket, "PUT latest")
    assert len(said) == 11 and sum("/0.pt" in one or ".pt" in one for one in said) == 4


def test_a_tag_that_another_program_has_written_meanwhile_stays_that_programs(bucket):
    nebulaml.init(PATH, 0, 2, on_error="raise")
    save(1, 10)
    make_versions(PATH, 3)  # global_step1 to 3, of no run that this one came after
    with contextlib.suppress(nebulaml.NebulaError), nebulaml.Checkpoint("global_step2") as checkpoint:  # it may fail before the block ends
        checkpoint.save("0.pt", torch.ones(10))
    until(lambda: checkpoint.state == "failed", 60, "the version gives way")
    assert nebula("verify", "global_step2", "--path", PATH).returncode == 0


def test_no_record_stays_that_names_a_file_of_another_program(bucket):
    """A sweep would take that file for Nebula's."""
    nebulaml.init(PATH, 0, 2, on_error="raise")
    save(1, 10)
    bucket.put("training/run/global_step2/0.pt", b"theirs")
    bucket.requests()
    save(2, 10)
    said = kinds(bucket.requests())
    first = next(at for at, one in enumerate(said) if one.startswith("DELETE") and "record" in one)
    assert "PUT global_step2/0.pt" not in said[:first], "the name was seen to be taken"
    assert nebula("verify", "global_step2", "--path", PATH).returncode == 0


def test_a_search_that_passes_over_a_version_leaves_no_list_to_the_agent(bucket):
    make_versions(PATH, 3)
    bucket.put("training/run/global_step3/a", b"cut")
    nebulaml.init(PATH, 0, 2, on_error="raise")
    newest = nebulaml.get_latest_checkpoint()
    assert newest is not None and newest.tag == "global_step2" and newest.passed_over[0][0] == "global_step3"
    save(4, 10)
    assert nebula("verify", "global_step4", "--path", PATH).returncode == 0


FOLLOW = """
import os, sys, nebulaml as nm
with nm.Subscriber(sys.argv[1], poll=0.05) as follower:
    for line in sys.stdin:
        answers = [follower.prepare(60 if line == "next\\n" else 0) for _ in range(1 if line == "next\\n" else 10)]
        for answer in answers:
            if answer is not None:
                answer.commit()
        os.write(1, f"{[answer and answer.step for answer in answers]}\\n".encode())
"""


def test_a_follower_on_another_node_reads_a_publication_once_and_asks_four_times_whether_there_is_a_newer_one(bucket, place):
    def ask(line: str) -> str:
        follower.stdin.write(f"{line}\n")
        follower.stdin.flush()
        return follower.stdout.readline().strip()

    for name in "runtime", "memory":
        (place.root / name).mkdir(mode=0o700, exist_ok=True)
    environment = {**os.environ, "NEBULA_RUNTIME_DIR": str(place.root / "runtime"), "NEBULA_MEMORY_DIR": str(place.root / "memory"), "NEBULA_NODE_ID": "other"}
    state = {"w": torch.zeros(1000)}
    with (
        fork_server.start(IMPORTS + FOLLOW, PATH, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as follower,
        nebulaml.Publisher(state, PATH) as publisher,
    ):
        for step in range(1, 4):
            state["w"].fill_(step)
            publisher.publish(step)
            publisher.wait(60)
            assert ask("next") == f"[{step}]"
        asked(bucket, "PUT latest")
        bucket.requests()
        assert ask("look") == str([None] * 10)
        said = [one for one in kinds(bucket.requests()) if "/leases/" not in one]
        assert len(said) <= 4 * 10 and not any("weights" in one or "nebula-metadata" in one for one in said), said
        follower.stdin.close()
        follower.wait(60)
