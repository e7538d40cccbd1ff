"""Jobs on a directory of a real NFS server, nfs-ganesha on this machine. scripts/nfs.sh brings it, and the client."""

# fault: as test_a_server_that_goes_and_comes_back_costs_time_and_no_checkpoint

import os
import shutil
import socket
import subprocess

import pytest
from nfs_client import ROOT, Client, built
from ports import held_port
from waiting import until

pytest.importorskip("nebulaml")

SETTINGS = """
NFS_CORE_PARAM {{ Protocols = 3; NFS_Port = {nfs}; MNT_Port = {mount}; Bind_addr = 127.0.0.1; Enable_NLM = false; Enable_RQUOTA = false;
    Enable_UDP = false; mount_path_pseudo = true; Plugins_Dir = {fsal}; }}
NFSv4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = {place}; Only_Numeric_Owners = true; }}
EXPORT {{ Export_Id = 1; Path = {export}; Pseudo = /store; Access_Type = RW; Squash = {squash}; SecType = sys; Protocols = 3; Transports = TCP;
    FSAL {{ Name = VFS; }} }}
"""


class Server:
    def __init__(self, programs, place, squash):
        self.programs, self.place, self.export = programs, place, place / "export"
        self.export.mkdir(parents=True)
        self.export.chmod(0o777)
        self.held = held_port(), held_port()
        self.ports = [held.getsockname()[1] for held in self.held]
        (place / "settings").write_text(
            SETTINGS.format(nfs=self.ports[0], mount=self.ports[1], fsal=f"{programs}/fsal", place=place, export=self.export, squash=squash)
        )
        self.environment = {"LD_LIBRARY_PATH": f"{programs}/lib"}
        self.start()

    @property
    def url(self):
        return f"nfs://127.0.0.1/store?nfsport={self.ports[0]}&mountport={self.ports[1]}"

    def start(self):
        words = ["-F", "-L", self.place / "log", "-f", self.place / "settings", "-p", self.place / "pid"]
        environment = os.environ | self.environment | {"LD_PRELOAD": f"{self.programs}/no_rpcbind.so"}
        self.process = subprocess.Popen([f"{self.programs}/ganesha.nfsd", *words], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.answers, 60, "the server")

    def answers(self):
        assert self.process.poll() is None, (self.place / "log").read_text()[-3000:]
        with socket.socket() as files, socket.socket() as mounts:  # a client asks the second one first
            return all(one.connect_ex(("127.0.0.1", port)) == 0 for one, port in zip((files, mounts), self.ports, strict=True))

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def served(nebula, tmp_path):
    if os.geteuid() or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("nfs-ganesha opens files by handle, which needs root, and its client needs /dev/fuse")
    made = subprocess.run([ROOT / "scripts/nfs.sh"], capture_output=True, text=True)
    if made.returncode == 77:
        pytest.skip(made.stderr.strip().splitlines()[-1])
    assert made.returncode == 0, made.stderr
    programs = made.stdout.strip()
    servers, clients = [], []

    def make_server(squash="No_Root_Squash"):
        servers.append(Server(programs, tmp_path / f"server{len(servers)}", squash))
        return servers[-1]

    def make_client(server):
        place = tmp_path / f"client{len(clients)}"
        clients.append(Client(nebula, place, lambda mount: [f"{programs}/nfs_bridge", server.url, mount], **server.environment))
        return clients[-1]

    yield make_server, make_client
    for client in clients:
        client.close()
    for server in servers:
        server.kill()
        for held in server.held:
            held.close()
        shutil.rmtree(server.export)


@pytest.mark.nightly
@pytest.mark.parametrize("squash", ["No_Root_Squash", "Root_Squash"])
def test_a_job_on_a_server_is_killed_and_goes_on_also_on_another_node(served, squash):
    make_server, make_client = served
    server = make_server(squash)
    first = make_client(server)
    first.train_until_killed(5)
    assert int(first.finish(8)[0].split()[1]) >= 5
    owner = (server.export / "store").stat().st_uid
    assert (owner == 0) == (squash == "No_Root_Squash")
    first.stop()
    second = make_client(server)
    assert int(second.finish(30)[0].split()[1]) >= 8
    assert second.command("verify", "--all").returncode == 0


@pytest.mark.nightly("integration/test_nfs.py::test_a_server_that_goes_and_comes_back_costs_time_and_no_checkpoint", "integration/test_nfs.py::test_a_job_on_nfs_is_killed_and_goes_on_also_on_another_node")
def test_a_server_that_is_killed_and_comes_back_costs_time_and_no_checkpoint(served):
    make_server, make_client = served
    server = make_server()
    client = make_client(server)
    job = client.job(1000)
    next(line for line in job.stdout if line == "durable 3\n")
    server.kill()
    before = max(int(path.name.removeprefix("global_step")) for path in server.export.glob("store/global_step*"))
    server.start()
    next(line for line in job.stdout if line == f"durable {before + 3}\n")
    job.kill()
    job.wait()
    assert int(client.finish(0)[0].split()[1]) >= before + 3
    assert client.command("verify", "--all").returncode == 0


@pytest.mark.nightly("integration/test_nfs.py::test_a_server_that_goes_and_comes_back_costs_time_and_no_checkpoint")
@pytest.mark.parametrize("test", ["nfs_conformance_test", "nfs_conformance_list_test"])
def test_the_driver_keeps_its_promises_on_a_server(served, test):
    make_server, make_client = served
    if not built(test):
        pytest.skip("the C tests were not built")
    client = make_client(make_server())
    done = subprocess.run([built(test)], env=os.environ | {"NB_TEST_MOUNT": str(client.mount)}, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout
