"""Each test has its own agent, memory directory and storage; jobs are real processes of a framework's own environment.

If NEBULA_TEST_STORAGE is s3, azure, adls or gs, the storage is an object store on a server of this machine, in place of a directory. Jobs that
name no storage path use it, too. A test of a feature that needs a directory is skipped then (directory_only).
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fork_server
import pytest
from nebulaml._session import locate
from ports import held_port
from processes import agents
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
ENDING = HERE / "ending.py"
RUN_ENDING = f"import runpy; runpy.run_path({str(ENDING)!r}, run_name='__main__')"
# Most of the CPU time of a job: its imports. An environment has some of these. Each job begins with an import of its framework.
IMPORTED = ("torch._dynamo", "torch.distributed.checkpoint", "torchmetrics", "deepspeed", "transformers.trainer")
COMPILES = "torch._inductor.compile_fx"  # DeepSpeed imports it for an optimizer, at the first initialize()

sys.path.append(str(ROOT / "tests" / "integration"))
from store_servers import Servers, shared  # noqa: E402

STORAGE = os.environ.get("NEBULA_TEST_STORAGE", "")
FULL = os.environ.get("NEBULA_TEST_FRAMEWORKS") == "all"
full = pytest.mark.skipif(not FULL, reason="one of the long ones: make test-frameworks")


def directory_only(reason: str) -> pytest.MarkDecorator:
    """Marks a test whose storage must be a directory, and says why. docs/storage.md lists the features."""
    return pytest.mark.skipif(bool(STORAGE), reason=f"needs a directory as its storage: {reason}")


LIMIT_S = 600 if FULL else 240  # less than pytest's own, so that a job says where it hangs


def interpreter(environment: str) -> str:
    """Returns the Python of .envs/<environment>. If `make test-frameworks` has not made it, the test is skipped.

    With NEBULA_TEST_NEWEST it is that of .envs/newest-<environment>, which scripts/newest.sh makes.
    """
    environment = f"newest-{environment}" if os.environ.get("NEBULA_TEST_NEWEST") else environment
    place = ROOT / ".envs" / environment
    if not (place / ".ready").exists():
        pytest.skip(f"no environment {environment}: make .envs/{environment}/.ready")
    return str(place / "bin" / "python")


class Url(str):
    """A storage path in an object store, in place of the Path of a directory."""

    __slots__ = ()

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self}/{name}")


class Node:
    """One node of the world: the directories of an agent, and the processes that run there."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.persist = base / "persist"
        self.runtime = Path(tempfile.mkdtemp(prefix="nb-"))
        self.memory = Path(tempfile.mkdtemp(prefix="nebula-test-", dir="/dev/shm"))
        self.environment = {
            **os.environ,
            "NEBULA_RUNTIME_DIR": str(self.runtime),
            "NEBULA_MEMORY_DIR": str(self.memory),
            "NEBULA_OUTPUT_DIR": str(base / "nebula"),
            "NEBULA_AGENT_LINGER": "300",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
        }

    def use(self, servers: Servers, store: str) -> None:
        """Takes an object store as the storage, in place of the directory, also for jobs that name none."""
        self.persist = Url(servers.new_path(store))
        secret = self.base / "secret"  # of the agents of several nodes, for which a directory has a place
        secret.touch(0o600)
        secret.write_bytes(os.urandom(32))
        self.environment |= servers.variables(store) | {"NEBULA_PERSISTENT_STORAGE_PATH": self.persist, "NEBULA_SECRET_FILE": str(secret)}

    def place(self, name: str) -> Path | Url:
        """Returns another place in the same kind of storage."""
        return Url(f"{self.persist}-{name}") if isinstance(self.persist, Url) else self.base / name

    def of_rank(self, rank: int) -> dict[str, str]:
        """Returns the node of a rank, if each rank is a node with its own agent and memory."""
        return {
            "NEBULA_NODE_ID": f"node{rank}",
            "NEBULA_MEMORY_DIR": str(self.memory / f"node{rank}"),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
        }

    def run(
        self, python: str, script: str, *args: str, ranks: int = 1, check: bool = True, timeout: float = LIMIT_S, nodes: bool = False
    ) -> "Result":
        """Runs a script on `ranks` ranks, and waits for all. Returns the output of rank 0, one JSON object a line.

        nodes: each rank is a node; {rank} in an argument becomes its number.
        """
        with held_port() as held:
            output, codes = self._run(python, script, args, ranks, timeout, nodes, held.getsockname()[1])
        result = Result(output, codes)
        if check and any(result.codes):
            pytest.fail(f"{script} {args} ended with {result.codes}\n{output[-2000:]}\n{self.logs()}")
        return result

    def _run(self, python: str, script: str, args: tuple, ranks: int, timeout: float, nodes: bool, port: int) -> tuple[str, list[int]]:
        processes = []
        for rank in range(ranks):
            environment = {
                **self.environment,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **(self.of_rank(rank) if nodes else {}),
            }
            log = open(self.base / f"{Path(script).stem}-rank{rank}.log", "ab")  # noqa: SIM115
            processes.append(
                fork_server.start(
                    RUN_ENDING,
                    HERE / script,
                    *(str(one).replace("{rank}", str(rank)) for one in args),
                    env=environment,
                    stdout=subprocess.PIPE if rank == 0 else log.fileno(),
                    stderr=log.fileno(),
                    cwd=self.base,
                    python=python,
                    modules=(*IMPORTED, COMPILES) if "/deepspeed-" in python else IMPORTED,
                )
            )
        try:
            output = processes[0].communicate(timeout=timeout)[0]
            for process in processes[1:]:
                if processes[0].returncode != 0:
                    process.kill()
                process.wait(timeout=60)
        except subprocess.TimeoutExpired as late:
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGABRT)  # it writes down where it is
                    process.wait(timeout=60)
            pytest.fail(f"{script} {args} did not end in {late.timeout} s: {[process.returncode for process in processes]}\n{self.logs()}")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
        return output, [process.returncode for process in processes]

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(self.base.glob("*-rank*.log")))

    def agent_pid(self, rank: int | None = None) -> int | None:
        wanted = {f"NEBULA_RUNTIME_DIR={self.runtime}"}
        if rank is not None:
            wanted.add(f"NEBULA_NODE_ID=node{rank}")
        return next(iter(agents(wanted.issubset)), None)

    def stored(self, path: Path | Url | None = None) -> list[str]:
        """Returns the tags in storage, as an agent finds them that has nothing in memory. path: another storage path than the node's."""
        return [version["tag"] for version in self._ask("list", path=path).get("versions", [])]

    def inspect(self, tag: str) -> dict:
        """Returns the files and ranks of a version in storage."""
        return self._ask("inspect", tag)

    def _ask(self, *words: str, path: Path | Url | None = None) -> dict:
        said = subprocess.run(
            [locate.agent_path(), *words, "--json", "--path", path or self.persist],
            env=self.environment | {"NEBULA_RUNTIME_DIR": str(self.base / "no agent")}, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert said.returncode in (0, 3), said.stderr  # 3: there is none
        return json.loads(said.stdout)

    def wait_durable(self, tag: str, timeout: float = 120) -> None:
        """Waits until the manifest of a tag exists. The agent still writes after the job has ended."""
        if isinstance(self.persist, Url):
            until(lambda: tag in self.stored(), timeout, f"{tag} in {self.persist}")
            return
        manifest = self.persist / tag / ".nebula" / "manifest-1.json"
        end = time.monotonic() + timeout
        while not manifest.exists():
            assert time.monotonic() < end, f"{tag} is not durable after {timeout} s"
            time.sleep(0.05)

    def forget_memory(self, rank: int | None = None) -> None:
        """Ends the agent of this node, or of a rank's node, and removes its memory, as if the node was replaced."""
        pid = self.agent_pid(rank)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        memory = self.memory if rank is None else self.memory / f"node{rank}"
        shutil.rmtree(memory, ignore_errors=True)
        memory.mkdir()

    def close(self) -> None:
        for pid in {self.agent_pid(), self.agent_pid(0), self.agent_pid(1)} - {None}:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.memory, ignore_errors=True)
        for place in self.runtime.parent.glob(f"{self.runtime.name}*"):
            shutil.rmtree(place, ignore_errors=True)


class Result:
    def __init__(self, output: str, codes: list[int]) -> None:
        self.output = output
        self.codes = codes
        self.lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]

    @property
    def losses(self) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in self.lines if "step" in line and "loss" in line}

    def losses_after(self, step: int) -> dict[int, float]:
        return {at: loss for at, loss in self.losses.items() if at > step}

    @property
    def end(self) -> dict:
        return next(line for line in self.lines if line.get("end"))

    @property
    def resumed(self):
        return next(line["resumed"] for line in self.lines if "resumed" in line)


def files_below(directory: Path) -> list[str]:
    """Returns the files that a framework would see there: all except Nebula's own mark."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != ".nebula.json")
    return sorted(str(path.relative_to(directory)) for path in paths)


@pytest.fixture(scope="session")
def servers():
    """The servers of stores. They end with the tests."""
    return shared()


@pytest.fixture
def node(tmp_path, servers):
    made = Node(tmp_path)
    if STORAGE:
        made.use(servers, STORAGE)
    yield made
    made.close()


@pytest.fixture
def this_python():
    return sys.executable
