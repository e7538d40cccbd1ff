"""Jobs on a directory of an NFS client: it may show changes of other nodes late, and the server may vanish and come back.

tests/servers/nfs_fuse.c simulates the client. Two mounts of one directory are two nodes.
"""

import time

import pytest
from nfs_client import Client, built

pytest.importorskip("nebulaml")


class PlayedClient(Client):
    """A client whose rules the test changes while it runs."""

    def __init__(self, nebula, place, program, server):
        self.control = place / "control"
        place.mkdir()
        self.rules()
        super().__init__(nebula, place, lambda mount: [program, server, mount, self.control])

    def rules(self, **rules):
        fresh = self.control.with_suffix(".new")
        fresh.write_text("".join(f"{name} {value}\n" for name, value in rules.items()))
        fresh.rename(self.control)

    def close(self):
        self.rules()
        super().close()


@pytest.fixture
def clients(nebula, tmp_path):
    program = built("nfs_fuse")
    if not program:
        pytest.skip("tests/servers/nfs_fuse.c was not built: libfuse 3 was not there")
    (tmp_path / "server").mkdir()
    made = []

    def make():
        made.append(PlayedClient(nebula, tmp_path / f"client{len(made)}", program, tmp_path / "server"))
        return made[-1]

    yield make
    for client in made:
        client.close()


# fault: as test_a_server_that_goes_and_comes_back_costs_time_and_no_checkpoint
def test_a_job_on_nfs_is_killed_and_goes_on_also_on_another_node(clients):
    first = clients()
    first.rules(ttl_ms=3000, squash=1, ahead_s=3600)
    first.train_until_killed(5)
    assert int(first.finish(8)[0].split()[1]) >= 5
    first.stop()
    second = clients()
    assert int(second.finish(30)[0].split()[1]) >= 8
    assert second.command("verify", "--all").returncode == 0


# fault (Storage): An NFS server stops and comes back, its clock is ahead, or it assigns files to no user
# (`root_squash`).
# result: A hard mount waits and nothing fails. With a soft mount versions wait in memory, and a resume says that
# storage cannot be read.
def test_a_server_that_goes_and_comes_back_costs_time_and_no_checkpoint(clients):
    client = clients()
    assert client.finish(2)[-1] == "durable 2"
    for down in (1, 2):  # a hard mount waits, a soft one fails
        client.rules(down=down)
        job = client.job(2 + down)
        time.sleep(1.5)
        assert job.poll() is None or down == 2
        client.rules()
        said = job.communicate(timeout=120)[0]
        if job.returncode:  # a soft mount may fail the look for the newest version: that is said, and nothing begins from nothing
            assert down == 2 and "from 0" not in said
            said = "\n".join(client.finish(2 + down))
        assert f"durable {2 + down}" in said


# fault (Storage): The mount shows an outdated `latest` or listing (an NFS client for some seconds, a mount with a
# cache for ever).
# result: The job may go on from an older version. The server decides that the names of the newer versions are taken,
# so these stay and are complete. The job learns that its versions are not durable, and why.
def test_a_mount_that_shows_an_old_latest_is_harmless(clients):
    writer, stale = clients(), clients()
    writer.finish(3)
    stale.rules(ttl_ms=3_600_000)
    shown = (stale.path / "latest").read_text()
    seen = sorted(stale.path.rglob("*"))
    assert "global_step3" in shown and stale.path / "global_step3" in seen
    writer.finish(6)
    writer.stop()
    # The mount shows the listings of before, and for names that it knows the attributes of before.
    assert sorted(stale.path.rglob("*")) == seen
    job = stale.job(8)
    said, failed = job.communicate(timeout=120)
    begun = said.splitlines()[0]
    if begun == "from 3":
        assert job.returncode == 1 and said.splitlines() == ["from 3"]
        assert 'has made "global_step4" durable' in failed and "that checkpoint stays" in failed
    else:  # this node's agent changed the directory before the search, so the client listed it again
        assert begun == "from 6" and job.returncode == 0, failed
    stale.stop("--now", "--yes")
    # The other job's files are unchanged. The next test step uses a mount that caches attributes for some seconds, as NFS does.
    assert writer.command("verify", "--all").returncode == 0
    stale.rules(ttl_ms=500)
    time.sleep(0.6)
    assert stale.finish(8)[0] == ("from 6" if begun == "from 3" else "from 8")
    assert writer.command("verify", "--all").returncode == 0
