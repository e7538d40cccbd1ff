"""Nodes are lost and come back: no committed step is lost, and none is computed twice."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import nebulaml as nm
import psutil
import pytest
from conftest import ROOT, Node, Url, directory_only, full, interpreter
from elastic_nodes import Cluster
from metadata_server import azure, serving
from nebulaml._session import locate
from torch.distributed.run import get_args_parser
from waiting import until


@pytest.fixture
def cluster(node):
    made = []

    def make(*arguments, **more):
        made.append(Cluster(node, "elastic_job.py", *arguments, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def losses(cluster):
    return {row["step"]: row["loss"] for row in nm.MetricsLog(cluster.place / "metrics.jsonl").read()}


def bytes_read(job, name):
    """Returns how much the agent of a node has read, from files and from an object store."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{job.agent(name)}/io").read_text().splitlines())
    environment = job.node.environment | {"NEBULA_NODE_ID": name, "NEBULA_MEMORY_DIR": str(job.node.memory / name)}
    said = subprocess.run([locate.agent_path(), "metrics"], env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    counted = re.findall(r'nebula_storage_bytes_total{.*direction="read".*} (\d+)', said)
    assert counted, said
    return int(fields["rchar"]) + sum(map(int, counted))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns forty steps of one rank, for each way."""
    found = {}

    def of(way):
        if way not in found:
            node = Node(tmp_path_factory.mktemp("whole"))
            cluster = Cluster(node, "elastic_job.py", "--way", way, "--steps", 40)
            try:
                cluster.start("node0")
                cluster.finish(40, 1)
                found[way] = losses(cluster)
            finally:
                cluster.close()
                node.close()
        return found[way]

    return of


def close(found, wanted):
    assert list(found) == list(wanted)
    for step, loss in found.items():
        assert loss == pytest.approx(wanted[step], rel=1e-9), step


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_one_three_and_two_nodes_train_as_one_undisturbed(cluster, undisturbed, way):
    """A step that all ranks have committed, and whose copy is in another node's memory, is not computed again."""
    job = cluster("--way", way, "--replicas", 1, "--steps", 40)
    job.start("node0", "node1")
    job.train(10, 2)
    job.lose("node0")
    job.train(20, 1)
    assert [one["resumed"] for one in job.resumes(1)] == [10]
    job.start("node2", "node3")
    job.train(30, 3)
    assert {one["resumed"] for one in job.resumes(3)} == {20}
    job.lose("node2")
    job.finish(40, 2)
    assert {one["resumed"] for one in job.resumes(2)} == {0, 30}
    close(losses(job), undisturbed(way))


@pytest.mark.nightly("integration/test_elastic_nodes.py::test_the_first_node_is_killed_the_other_goes_on_and_one_returns", "integration/test_replicas.py::test_the_nodes_that_are_left_load_the_lost_share_from_memory_though_storage_has_it")
@pytest.mark.parametrize("way", ["ddp", pytest.param("fsdp2", marks=full)])
def test_a_survivor_resumes_from_memory_and_reads_nothing_from_storage(cluster, node, way):
    """The state has more than 6 MB. The part that DCP saved is durable, too, and the rest is in memory only."""
    job = cluster("--way", way, "--replicas", 1, "--interval", 3600)
    job.start("node0", "node1")
    job.train(10, 2)
    if way == "ddp":
        assert "global_step10" not in node.stored()
    else:
        node.wait_durable("global_step10", 120)
        time.sleep(1)
    before = bytes_read(job, "node1")
    job.lose("node0")
    job.open_gate(11, 1)
    (resumed,) = job.until(lambda said: job.resumes(1), "a resume")
    assert resumed["resumed"] == 10 and resumed["state"] in (("committed", "replicated") if way == "ddp" else ("durable",))
    assert bytes_read(job, "node1") - before < 200_000, "the agent has read more than documents"
    job.train(11, 1)


def test_without_copies_the_newest_durable_version_is_resumed(cluster, node):
    job = cluster("--steps", 40)
    job.start("node0", "node1")
    job.train(10, 2)
    node.wait_durable("global_step10")
    job.lose("node0")
    job.train(12, 1)
    assert [one["resumed"] for one in job.resumes(1)] == [10]


def test_a_node_that_returns_with_older_memory_does_not_bring_back_what_was_left(cluster, node, undisturbed):
    """The node's share of step 10, and that of the node that continued from step 1 without it, are a complete version of an abandoned line."""
    job = cluster("--interval", 3600, "--steps", 40)
    job.start("node0", "node1")
    job.train(10, 2)
    node.wait_durable("global_step1")
    job.lose("node1", keeps_memory=True)
    job.train(6, 1)
    assert [one["resumed"] for one in job.resumes(1)] == [1]
    job.start("node1")
    job.train(8, 2)
    assert {one["resumed"] for one in job.resumes(2)} == {0, 6}
    job.finish(40, 2)
    close(losses(job), undisturbed("ddp"))


def test_nodes_that_are_lost_in_a_save_a_resume_and_a_rendezvous_change_no_loss(cluster, undisturbed):
    job = cluster("--replicas", 1, "--steps", 40)
    job.open_gate(40, 1)
    job.start("node0", "node1")
    job.until(lambda said: max(losses(job), default=0) >= 5, "step 5")  # it saves after each step
    job.lose("node0")
    job.until(lambda said: job.resumes(1), "a resume alone")  # which may go on
    job.start("node2")
    time.sleep(4)  # in its start, or the rendezvous
    job.lose("node2")
    job.start("node3")
    job.until(lambda said: [one for one in said if one["node"] == "node3"] or max(losses(job), default=0) >= 39, "node3")
    job.lose("node3")
    job.finish(40, 1)
    close(losses(job), undisturbed("ddp"))


# fault (Elastic jobs): Workers alone or Nebula's agent alone are killed, or both nodes.
# result: `torchrun` starts killed workers again. The death of the agent restarts nothing. The losses are bit for bit
# those of an undisturbed run with that number of ranks.
def test_workers_an_agent_and_both_nodes_are_killed_and_with_the_world_kept_no_loss_differs_in_a_bit(cluster, node, tmp_path):
    (tmp_path / "calm").mkdir()
    other = Node(tmp_path / "calm")
    calm, job = Cluster(other, "elastic_job.py", "--steps", 40), cluster("--steps", 40)
    try:
        calm.start("node0", "node1")
        calm.finish(40, 2)
        wanted = losses(calm)
    finally:
        calm.close()
        other.close()
    job.start("node0", "node1")
    job.train(10, 2)
    job.kill_worker("node0")
    job.until(lambda said: [one["resumed"] for one in job.resumes(2)][2:] == [10, 10], "a resume after a worker's death")
    job.kill_worker("node1")
    job.until(lambda said: [one["resumed"] for one in job.resumes(2)][4:] == [10, 10], "a resume after the other worker's death")
    job.train(15, 2)
    os.kill(job.agent("node1"), signal.SIGKILL)
    job.train(25, 2)
    node.wait_durable("global_step25")
    assert len(job.resumes(2)) == 6, "the death of the agent alone costs no restart"
    job.lose("node0")
    job.lose("node1")
    job.start("node0", "node1")
    job.finish(40, 2)
    assert [one["resumed"] for one in job.resumes(2)][6:] == [25, 25]
    assert losses(job) == wanted and list(wanted) == list(range(1, 41))


# fault (Elastic jobs): `torchrun` alone is killed.
# result: Its worker ends at once, and the others go on. The memory of its node stays.
def test_a_worker_whose_torchrun_was_killed_ends_and_the_others_go_on(cluster, node, undisturbed):
    """With torch's own rendezvous this worker would train on in the old world, and save."""
    job = cluster("--replicas", 1, "--steps", 30)
    job.start("node0", "node1", rendezvous=["--rdzv-backend=nebula-store", f"--rdzv-endpoint={node.place('rendezvous')}"])
    job.train(10, 2)
    worker, agent = psutil.Process(job.worker("node0")), job.agent("node0")
    job.processes["node0"].kill()
    worker.wait(10)
    assert job.agent("node0") == agent, "the memory of the node has ended, too"
    job.train(20, 1)
    assert [one["resumed"] for one in job.resumes(1)] == [10]
    job.finish(30, 1)
    close(losses(job), {step: loss for step, loss in undisturbed("ddp").items() if step <= 30})


CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void)
{
        const char *text = getenv("CLOCK_AHEAD");

        return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
        int (*real)(clockid_t, struct timespec *) = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
        int result = real(clock, now);

        if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
                now->tv_sec += ahead();
        return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
        struct timespec exact;

        (void)zone;
        clock_gettime(CLOCK_REALTIME, &exact);
        now->tv_sec = exact.tv_sec;
        now->tv_usec = exact.tv_nsec / 1000;
        return 0;
}

time_t time(time_t *ret_now)
{
        struct timespec exact;

        clock_gettime(CLOCK_REALTIME, &exact);
        if (ret_now)
                *ret_now = exact.tv_sec;
        return exact.tv_sec;
}
"""


# fault (Elastic jobs): The clocks of the nodes differ by an hour.
# result: The job goes on as if they agreed.
@directory_only("an object store refuses the requests of a node whose clock is an hour wrong")
def test_nodes_whose_clocks_differ_by_an_hour_lose_nothing(cluster, undisturbed, tmp_path):
    """The first nodes are an hour ahead of each other, and the one that is ahead makes the storage. The one that is left is behind, and the
    next one still more."""
    (tmp_path / "clock.c").write_text(CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c", "-ldl"], check=True)
    rendezvous = ["--rdzv-backend=nebula-store", f"--rdzv-endpoint={tmp_path / 'rendezvous'}"]
    job = cluster("--replicas", 1, "--steps", 40)

    def start(name, ahead):
        job.start(name, rendezvous=rendezvous, LD_PRELOAD=str(tmp_path / "clock.so"), CLOCK_AHEAD=str(ahead))

    start("node0", 3600)
    until(lambda: list((tmp_path / "rendezvous").rglob("state/*")))
    start("node1", 0)
    job.train(10, 2)
    first = {one["node"]: one["at"] for one in job.resumes(2)}
    assert first["node0"] - first["node1"] > 3000, "the clocks differ"
    job.lose("node0")
    job.train(20, 1)
    assert [one["resumed"] for one in job.resumes(1)] == [10]
    start("node2", -3600)
    job.train(30, 2)
    assert [one["resumed"] for one in job.resumes(2)][2:] == [20, 20]
    job.lose("node1")
    job.finish(40, 1)
    assert [one["resumed"] for one in job.resumes(1)] == [10, 30]
    close(losses(job), undisturbed("ddp"))


@full
@pytest.mark.parametrize(("folder", "environment"), [("elastic-cifar", None), ("elastic-cifar-lightning", "lightning")])
def test_the_recipe_loses_and_regains_nodes_and_ends_as_if_nothing_had_happened(node, folder, environment):
    command = [interpreter(environment) if environment else sys.executable, ROOT / "examples/elastic-cifar/nodes.py", "--steps", "45"]
    command += ["--script", ROOT / "examples" / folder / "train.py", "--plot", node.base / "picture.png"]
    command += ["--storage", node.persist] if isinstance(node.persist, Url) else []
    done = subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "the elastic run is the undisturbed one" in done.stdout and (node.base / "picture.png").stat().st_size > 10_000


@pytest.fixture
def recipe_nodes(node, monkeypatch):
    """Returns a maker of the nodes of examples/elastic-cifar."""
    spec = importlib.util.spec_from_file_location("nodes", ROOT / "examples/elastic-cifar/nodes.py")
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    storage = node.persist if isinstance(node.persist, Url) else None
    for variable, value in node.environment.items() if storage else ():
        monkeypatch.setenv(variable, value)

    def make(name, *options):
        return recipe.Nodes(node.runtime, node.memory, name, recipe.HERE / "train.py", list(options), 2, storage)

    return make


# fault (Elastic jobs): SIGTERM comes to one of two `torchrun`s: a drain of Kubernetes, `scancel`, an eviction.
# result: The manager saves, the newest version is made safe, and no step is computed twice.
def test_a_node_that_is_told_to_leave_saves_first_and_no_step_is_computed_twice(recipe_nodes):
    """Only the notice asks for a save. Torchrun gets SIGTERM, as from Kubernetes, Slurm or a cloud."""
    nodes = recipe_nodes("leaving", "--steps", "60", "--save-every", "1000")
    try:
        nodes.start(0)
        nodes.start(1)
        nodes.until_step(10, world=2)
        os.kill(nodes.processes[0].pid, signal.SIGTERM)
        nodes.finish()
        computed = [json.loads(line) for line in (nodes.path / "metrics.jsonl").read_text().splitlines()]
    finally:
        nodes.close()
    steps = [line["step"] for line in computed if "step" in line]
    assert steps == list(range(1, 61))
    worlds = [line["values"]["world"] for line in computed if "step" in line]
    assert worlds == sorted(worlds, reverse=True) and set(worlds) == {1, 2}


# fault (Elastic jobs): A node is told to leave while a spare waits.
# result: The spare takes its place, and no step is computed twice.
def test_a_spare_takes_the_place_of_a_node_that_is_told_to_leave_and_no_step_is_computed_twice(recipe_nodes):
    """The job never trains with fewer nodes: all steps are those of two."""
    nodes = recipe_nodes("spare", "--steps", "60", "--save-every", "1000")
    try:
        for number in range(2):
            nodes.start(number, most=2, least=2)
        nodes.until_step(3, world=2)
        nodes.start(2, most=2, least=2)
        nodes.until(lambda: any('"r"' in path.read_text() for path in nodes.path.rglob(".nebula/rendezvous/*/state/*")), "the spare")
        os.kill(nodes.processes[0].pid, signal.SIGTERM)
        nodes.finish()
        computed = [json.loads(line) for line in (nodes.path / "metrics.jsonl").read_text().splitlines()]
    finally:
        nodes.close()
    steps = [line for line in computed if "step" in line]
    assert [line["step"] for line in steps] == list(range(1, 61)) and {line["values"]["world"] for line in steps} == {2}


# fault (Elastic jobs): The cloud announces that it takes the machine of one of two nodes.
# result: The node saves, leaves, and does not join again.
def test_a_node_that_its_cloud_takes_leaves_and_does_not_join_again(recipe_nodes, monkeypatch):
    """The machine stays for minutes after the notice: torchrun must not start the workers there again and again."""
    nodes = recipe_nodes("evicted", "--steps", "60", "--save-every", "1000", "--evictions", "azure")
    with serving() as calm, serving() as taken:
        try:
            for number, cloud in enumerate((calm, taken)):
                monkeypatch.setenv("NEBULA_METADATA_URL", cloud.url)
                nodes.start(number)
            nodes.until_step(10, world=2)
            azure(taken, kind="Redeploy", seconds=600)
            assert nodes.processes[1].wait(60) != 0
            nodes.finish()
            computed = [json.loads(line) for line in (nodes.path / "metrics.jsonl").read_text().splitlines()]
        finally:
            nodes.close()
    steps = [line["step"] for line in computed if "step" in line]
    assert steps == list(range(1, 61)), "no step is computed twice"
    worlds = [line["values"]["world"] for line in computed if "step" in line]
    assert worlds == sorted(worlds, reverse=True) and set(worlds) == {1, 2}


JOB_FILES = """
import json, sys
from pathlib import Path
import dockerfile, kubernetes_validate, yaml
from azure.ai.ml import load_job
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet
folder = Path(sys.argv[1])
job = load_job(folder / "azureml.yml")
assert job.type == "command", job
pod = yaml.safe_load((folder / "kubernetes.yml").read_text())
kubernetes_validate.validate(pod, "1.31", strict=True)
container = pod["spec"]["template"]["spec"]["containers"][0]
if (folder / "jobset.yml").exists():
    jobset = yaml.safe_load((folder / "jobset.yml").read_text())
    assert JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset, "a field that JobSet does not have"
    [node] = jobset["spec"]["replicatedJobs"]
    assert node["template"]["spec"] == pod["spec"], "the JobSet has another Job than kubernetes.yml"
build = job.environment.build
steps = dockerfile.parse_file(str(folder / build.path / build.dockerfile_path))
print(json.dumps({
    "azureml": job.command.split(), "kubernetes": container["command"] + container["args"],
    "nodes": job.resources.instance_count, "shm": job.resources.shm_size, "pods": pod["spec"].get("completions", 1),
    "distribution": job.distribution and [job.distribution.type, job.distribution.process_count_per_instance],
    "services": sorted(str(service.type) for service in (job.services or {}).values()),
    "image": container["image"], "dockerfile": str((folder / build.path / build.dockerfile_path).resolve()), "environment": [[step.cmd, list(step.value)] for step in steps], "instructions": list(dockerfile.all_cmds()),
}))
"""
SERVICES = ["jupyter_lab", "tensor_board", "vs_code"]
JOBS = {  # folder: nodes, memory, distribution, services
    "elastic-cifar": (8, "64g", None, []),
    "elastic-cifar-lightning": (8, "64g", None, []),
    "bert": (2, "64g", ["pytorch", 8], SERVICES),
    "cifar-deepspeed": (2, "64g", ["pytorch", 8], SERVICES),
    "bloom": (2, "64g", ["pytorch", 8], [service for service in SERVICES if service != "tensor_board"]),
    "mnist": (1, "2g", None, SERVICES),
}


def options_of_training(command):
    """Returns the options that reach train.py. torchrun's parser reads its own options."""
    if command[0] == "torchrun":
        read = get_args_parser().parse_args(command[1:])
        assert read.rdzv_backend == "nebula-store"
        script, options = read.training_script, read.training_script_args
    else:
        assert command[0] == "python"
        script, *options = command[1:]
    assert Path(script).name == "train.py"
    return {option.split("=")[0] for option in options if option.startswith("--")}


@full
@pytest.mark.parametrize("name", JOBS)
def test_the_job_files_are_what_their_tools_take(name):
    folder = ROOT / "examples" / name
    done = subprocess.run([interpreter("job-files"), "-c", JOB_FILES, folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout)
    assert (said["nodes"], said["shm"], said["distribution"], said["services"]) == JOBS[name]
    assert said["pods"] == said["nodes"]

    assert said["dockerfile"] == str(ROOT / "examples/environment/Dockerfile")
    assert f"-t {said['image']} " in Path(said["dockerfile"]).read_text(), "no Dockerfile makes this image"
    steps = said["environment"]
    assert all(instruction.lower() in said["instructions"] for instruction, _ in steps), steps
    assert all((ROOT / "examples" / source).exists() for instruction, value in steps if instruction == "COPY" for source in value[:-1] if "*" not in source)

    batch = (folder / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", folder / "slurm.sh"], check=True)
    last_line = next(line for line in batch.replace("\\\n", " ").splitlines() if line.startswith("srun"))
    command = shlex.split(last_line.removesuffix("&"))
    start = next(place for place, word in enumerate(command) if word in ("torchrun", "python"))

    source = (folder / "train.py").read_text()
    known = set(re.findall(r'add_argument\("(--[a-z_-]+)"', source))
    for launched in (said["azureml"], said["kubernetes"], command[start:]):
        assert {"--path", "--steps", "--save-every"} <= options_of_training(launched) <= known, launched

    read = subprocess.run([ROOT / "scripts/sbatch.sh", folder / "slurm.sh"], capture_output=True, text=True, timeout=120)
    if read.returncode == 77:
        pytest.skip(f"sbatch has not read slurm.sh; all else was checked: {read.stderr.strip()}")
    assert read.returncode == 0, read.stderr


SRUN = """#!/bin/bash
trap 'sleep 0.5; echo saved >>log; exit 143' TERM
echo "srun $1" >>log
while sleep 0.1; do :; done
"""


@pytest.mark.parametrize("name", ["elastic-cifar", "elastic-cifar-lightning"])
def test_before_its_time_limit_a_job_of_slurm_saves_and_queues_itself_again(tmp_path, name):
    for tool, text in {"srun": SRUN, "scontrol": "#!/bin/bash\necho scontrol $* >>log\n"}.items():
        (tmp_path / tool).write_text(text)
        (tmp_path / tool).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SCRATCH": str(tmp_path)}
    batch = (ROOT / "examples" / name / "slurm.sh").read_text()
    assert "#SBATCH --signal=B:USR1@120\n" in batch and "#SBATCH --requeue\n" in batch
    job = subprocess.Popen(["bash", ROOT / "examples" / name / "slurm.sh"], cwd=tmp_path, env=environment)
    log = tmp_path / "log"
    until(lambda: log.exists() and log.read_text())
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 143
    assert log.read_text().splitlines() == ["srun --kill-on-bad-exit=0", "saved", "scontrol requeue 7"]


def test_the_environment_of_the_job_files_has_the_versions_that_are_tested():
    def pins(path):
        return set((ROOT / path).read_text().split())

    tested = set().union(*(pins(f"requirements/frameworks/{name}.txt") for name in ("hf", "deepspeed-0.19.8", "lightning", "trackers")))
    assert pins("examples/environment/requirements.txt") <= tested
