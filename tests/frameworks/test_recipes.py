"""Each recipe of examples/ runs, stops, and resumes from there."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import nebulaml
import pytest
from conftest import ENDING, ROOT, Url, directory_only, full, interpreter

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
RECIPES = {
    "mnist": (None, []),
    "cifar-deepspeed": ("deepspeed-0.19.8", [*TORCHRUN, "2"]),
    "bert": ("hf", [*TORCHRUN, "2"]),
    "bert-lightning": ("lightning", []),
    "fsdp2-dcp": (None, [*TORCHRUN, "2"]),
}


# Of each environment: the slow imports, and its recipes with their options and with what the run that resumes must print.
SHORT = {
    "torch": (
        "nebulaml.dcp,torch._dynamo,torch.distributed.fsdp,torch.distributed.pipelining,torch.distributed.tensor.parallel",
        {
            "mnist": ([], ["resumed after step 2"]),
            "fsdp2-dcp": (["--data", "words"], ["resumed after step 2 on 2 ranks"]),
            "bloom": (["--data", "words", "--layers", 2, "--pipeline", 1], ["resumed after step 2 on 1 x 1 x 2 ranks"]),
            "elastic-cifar": (["--global-batch", 8], []),
        },
    ),
    "deepspeed-0.19.8": (
        "nebulaml.deepspeed,deepspeed.runtime.engine,torch._dynamo,torch._inductor.compile_fx",
        {
            "cifar-deepspeed": ([], ["resumed after step 2"]),
            "autotuning": (["--deepspeed_config", "ds.json"], ["micro batch 8, ZeRO stage 1", "resumed after step 2"]),
        },
    ),
    "hf": (
        "nebulaml,transformers.trainer,transformers.models.bert.modeling_bert",
        {"bert": (["--data", "words"], ["resuming from checkpoint-2"])},
    ),
    "lightning": (
        "nebulaml,lightning.pytorch,pytorch_lightning,transformers.models.bert.modeling_bert",
        {
            "bert-lightning": (["--data", "words"], ["resumed after step 2"]),
            "elastic-cifar-lightning": (["--global-batch", 8], []),
        },
    ),
}


def storage_of(node, name):
    """Returns where the versions of a recipe go."""
    if name == "bert":  # its option --path is the Trainer's output_dir; the environment names an object store
        return node.persist if isinstance(node.persist, Url) else node.base / ".nebula" / name
    return node.persist / name


def options_of(node, name):
    """Returns the options of a recipe that say where its files go."""
    if name == "autotuning":
        return []  # DeepSpeed's configuration says it
    if name == "bert":
        return ["--path", node.base / name]
    if name in ("bert-lightning", "elastic-cifar", "elastic-cifar-lightning"):
        return ["--path", node.base / name, "--storage", storage_of(node, name)]
    return ["--path", storage_of(node, name)]


def write_inputs(node):
    """Writes the text that is quicker to read than Python's docstrings, and DeepSpeed's configuration as the autotuner would write it."""
    words = "".join(f"passage {n} of a text that has more of them, each longer than forty letters\n" for n in range(60))
    (node.base / "words").write_text(words)
    config = json.loads((ROOT / "examples/autotuning/ds.json").read_text())
    del config["autotuning"]
    config["train_micro_batch_size_per_gpu"] = 8
    config["nebula"]["persistent_storage_path"] = str(storage_of(node, "autotuning"))
    (node.base / "ds.json").write_text(json.dumps(config))


@pytest.mark.parametrize("environment", SHORT)
def test_the_short_form_of_each_recipe_resumes(node, environment):
    """Two steps and a save, then two more: the least that shows a recipe work. Those that can resume on another number of ranks do so."""
    python = sys.executable if environment == "torch" else interpreter(environment)
    modules, recipes = SHORT[environment]
    write_inputs(node)
    runs = []
    for name, (options, said) in recipes.items():
        for steps in (2, 4):
            more = [*options, "--steps", steps, "--save-every", 2, *options_of(node, name)]
            ranks = 2 if steps == 4 and any(line.endswith("ranks") for line in said) else 1
            more += ["--tensor", ranks] if name == "bloom" else []
            runs.append({"script": str(ROOT / "examples" / name / "train.py"), "ranks": ranks, "arguments": [*map(str, more)]})
    command = [python, ENDING.with_name("forked.py"), modules, json.dumps(runs)]
    done = subprocess.run(list(map(str, command)), env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=280)
    *outputs, rest = re.split(r"^-- ended: (\[.*\])\n", done.stdout, flags=re.MULTILINE)
    assert (done.returncode, rest) == (0, ""), rest + done.stderr[-3000:]
    assert outputs[1::2] == [str([0] * run["ranks"]) for run in runs], done.stdout + done.stderr[-3000:]
    for name, first, again in zip(recipes, outputs[0::4], outputs[2::4], strict=True):
        assert "resum" not in first
        assert not [line for line in recipes[name][1] if line not in again], again
        if name.startswith("elastic"):
            rows = nebulaml.MetricsLog(node.base / name / "metrics.jsonl").read()
            assert [row["step"] for row in rows] == [1, 2, 3, 4]
        assert node.stored(storage_of(node, name)), f"{name} has stored nothing"
    assert not list(node.base.glob("*:")), "a directory is named after the URL"


@directory_only("a directory that takes its time")
@pytest.mark.parametrize("name", ["elastic-cifar", "mnist"])
def test_the_last_step_of_a_recipe_is_durable_when_it_ends_because_a_container_ends_the_agent_with_it(node, name):
    node.environment["NEBULA_STORE_MBPS"] = "1"
    options = ["--global-batch", 8] if name == "elastic-cifar" else []
    script = ROOT / "examples" / name / "train.py"
    command = [sys.executable, *TORCHRUN, "1", ENDING, script, "--steps", 2, "--save-every", 2, *options, *options_of(node, name)]
    done = subprocess.run(list(map(str, command)), env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=280)
    node.forget_memory()
    assert done.returncode == 0, done.stderr[-3000:]
    assert [tag for tag in node.stored(storage_of(node, name)) if tag == "global_step2"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipe_resumes(node, name):
    environment, launcher = RECIPES[name]
    python = interpreter(environment) if environment else sys.executable

    def run(steps, *more):
        script = ROOT / "examples" / name / "train.py"
        command = [python, *launcher, ENDING, script, "--steps", steps, "--save-every", 10, *options_of(node, name), *more]
        done = subprocess.run(list(map(str, command)), env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    options = {"bert": ["--profile", node.base / "traces"], "cifar-deepspeed": ["--flops", node.base / "flops.txt"]}
    more = options.get(name, [])
    assert not [line for line in run(20, *more).splitlines() if line.startswith("resum")]
    again = run(40)
    if name == "bert":
        assert "resuming from checkpoint-20" in again
        assert again.count("'loss'") == 2
        traces = [json.loads(path.read_text())["traceEvents"] for path in (node.base / "traces").iterdir()]
        assert len(traces) == 2  # one per rank
        for events in traces:
            ours = {event["name"] for event in events if event.get("pid") == "nebula" and event["ph"] == "X"}
            assert "checkpoint-10" in ours and "commit checkpoint-10" in ours, ours
    else:
        assert "resumed after step 20" in again
        assert "step 40 loss" in again
        assert "step 20 loss" not in again
    assert node.stored(storage_of(node, name)) and not list(node.base.glob("*:"))
    if name == "cifar-deepspeed":
        assert "Flops Profiler" in (node.base / "flops.txt").read_text()


def kill_job(node):
    """Kills torchrun and all ranks, which have sessions of their own, but not the agent."""
    ours = f"NEBULA_RUNTIME_DIR={node.runtime}".encode()
    while True:
        found = []
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                folder = pathlib.Path("/proc") / entry
                if ours in (folder / "environ").read_bytes().split(b"\0") and b"train.py" in (folder / "cmdline").read_bytes():
                    found.append(int(entry))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def test_bloom_is_killed_and_goes_on_on_another_grid_with_the_losses_of_an_undisturbed_run(node):
    def command(path, ranks, grid, steps):
        words = [sys.executable, *TORCHRUN, ranks, ENDING, ROOT / "examples/bloom/train.py", "--path", path, "--steps", steps, "--save-every", 5]
        return [*map(str, words), "--pipeline", str(grid[0]), "--tensor", str(grid[1]), "--layers", "2"]

    def finish(*arguments):
        done = subprocess.run(command(*arguments), env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        return dict(re.findall(r"step (\d+) loss ([\d.]+)", done.stdout)), done.stdout

    calm, _ = finish(f"{node.persist}-calm", 2, (2, 1), 20)
    killed = subprocess.Popen(command(node.persist, 2, (2, 1), 1000), env=node.environment, cwd=node.base, stdout=subprocess.PIPE, text=True)
    try:
        seen = next(line for line in killed.stdout if line.startswith("step 10 "))
    finally:
        kill_job(node)
        killed.wait()
    assert float(seen.split()[-1]) == pytest.approx(float(calm["10"]), rel=1e-4)
    rest, said = finish(node.persist, 2, (1, 2), 20)
    after = int(re.search(r"resumed after step (\d+) on 1 x 1 x 2 ranks", said).group(1))
    assert (after >= 5 and "20" in rest) or after >= 20, said
    for step, loss in rest.items():
        assert float(loss) == pytest.approx(float(calm[step]), rel=1e-4)


@full
@pytest.mark.timeout(2400)  # each experiment is a process that imports DeepSpeed, and the autotuner looks every 10 s whether it has ended
def test_the_autotuner_finds_a_micro_batch_and_the_training_with_it_resumes(node):
    python = pathlib.Path(interpreter("deepspeed-0.19.8"))
    environment = node.environment | {"DS_ACCELERATOR": "cpu", "PATH": f"{python.parent}:{os.environ['PATH']}"}

    def run(*words):
        command = ["deepspeed", "--num_gpus", "1", *map(str, words)]
        done = subprocess.run(command, env=environment, cwd=node.base, capture_output=True, text=True, timeout=1100)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    folder = ROOT / "examples/autotuning"
    small = json.loads((folder / "ds.json").read_text())  # the recipe's search has twice as many experiments
    small["autotuning"] |= {"max_train_micro_batch_size_per_gpu": 16, "num_tuning_micro_batch_sizes": 1}
    (node.base / "ds.json").write_text(json.dumps(small))
    said = run("--num_nodes", 1, "--autotuning", "tune", folder / "train.py", "--deepspeed_config", node.base / "ds.json")
    assert "| z1 " in said, said[-3000:]
    assert not (node.base / "runs/autotuning").exists(), "an experiment has saved"
    found = node.base / "autotuning_results/ds_config_optimal.json"
    config = json.loads(found.read_text())
    assert config["nebula"] == small["nebula"]
    assert 8 <= config["train_micro_batch_size_per_gpu"] <= 16
    training = folder / "train.py", "--deepspeed_config", found, "--steps"
    assert "resumed" not in run(*training, 20)
    again = run(*training, 40)
    assert f"micro batch {config['train_micro_batch_size_per_gpu']}, ZeRO stage 1" in again
    assert "resumed after step 20" in again and "step 40 loss" in again and "step 20 loss" not in again


def test_the_scaling_script_measures_one_and_two_ranks_and_its_exit_code_tells_of_a_low_efficiency(node):
    def run(at_least):
        small = ["--width", 64, "--layers", 1, "--batch", 4, "--steps", 3, "--rounds", 2]
        script = ROOT / "examples/scaling/scaling.py"
        command = [sys.executable, *TORCHRUN, "2", ENDING, script, *small, "--at-least", at_least]
        return subprocess.run(list(map(str, command)), env=node.environment, cwd=node.base, capture_output=True, text=True, timeout=280)

    done = run(0)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.replace(" ms", "").replace("%", "").split() for line in done.stdout.splitlines() if line.endswith("%")]
    (one, step_of_one, rate_of_one, hundred), (two, step_of_two, rate_of_two, efficiency) = [list(map(float, row)) for row in rows]
    assert (one, two, hundred) == (1, 2, 100)
    assert rate_of_one == pytest.approx(4 / step_of_one * 1e3, rel=0.05)
    assert rate_of_two == pytest.approx(2 * 4 / step_of_two * 1e3, rel=0.05)
    assert efficiency == pytest.approx(rate_of_two / (2 * rate_of_one) * 100, rel=0.01)

    low = run(9)
    assert low.returncode == 1 and "an efficiency is below 900.0%" in low.stdout, low.stderr[-3000:]


# fault: as test_random_deaths_never_give_wrong_weights_and_never_go_back
@directory_only("trainer and rollout exchange batches in a directory")
def test_the_reward_rises_although_rollout_and_trainer_are_killed_and_each_rollout_has_weights_of_the_trainer(node):
    script = ROOT / "examples/rl/run.py"
    command = [sys.executable, "-W", "ignore", script, "--path", node.base / "rl", "--steps", 100]
    with open(node.base / "errors", "w+") as errors:
        job = subprocess.Popen(list(map(str, command)), env=node.environment, cwd=node.base, stdout=subprocess.PIPE, stderr=errors, text=True)
        processes, seen = {}, []

        def follow(until):
            for line in job.stdout:
                seen.append(line)
                if started := re.match(r"run: (\S+) is process (\d+)", line):
                    processes[started[1]] = int(started[2])
                if until(line):
                    return
            assert until(""), "".join(seen[-20:]) + (node.base / "errors").read_text()[-3000:]

        try:
            follow(lambda line: line.startswith("trainer: step 15 "))
            os.kill(processes["rollout.py"], signal.SIGKILL)
            follow(lambda line: line.startswith("run: rollout.py is process"))
            follow(lambda line: line.startswith("rollout: "))  # the new one: the lines of the killed one come before
            follow(lambda line: line.startswith("trainer: step 35 "))
            os.kill(processes["train.py"], signal.SIGKILL)
            follow(lambda line: not line)
        finally:
            job.terminate()
            job.stdout.close()
            job.wait(60)
    assert job.returncode == 0, "".join(seen[-20:])
    said = "".join(seen)
    resumed = [int(step) for step in re.findall(r"trainer: resumed after step (\d+)", said)]
    assert len(resumed) == 1 and 30 <= resumed[0] <= 50 and said.count("was killed by signal 9") == 2, said
    trained = set(re.findall(r"trainer: .*step (\d+) .*weights (\w+)", said))
    made = re.findall(r"rollout: publication (\d+) step (\d+) reward [\d.]+ weights (\w+)", said)
    assert {(step, weights) for _, step, weights in made} <= trained
    numbers = [int(number) for number, *_ in made]
    assert numbers == sorted(numbers) and len(set(numbers)) > 10
    rewards = [float(reward) for reward in re.findall(r"trainer: step \d+ reward ([\d.]+)", said)]
    assert sum(rewards[:10]) / 10 < 0.3 and sum(rewards[-10:]) / 10 > 0.7, rewards


def test_an_evaluator_that_is_killed_has_a_loss_for_checkpoints_of_a_trainer_that_is_killed(node):
    folder, path, table = ROOT / "examples/evaluate", node.base / "evaluate", node.base / "losses.csv"

    def start(script, *options):
        command = [sys.executable, "-W", "ignore", folder / script, "--path", path, *options]
        return subprocess.Popen(list(map(str, command)), env=node.environment, cwd=node.base, stdout=subprocess.PIPE, text=True)

    def lines(process, count):
        found = [process.stdout.readline() for _ in range(count)]
        assert all(found), found
        return found

    path.mkdir()
    evaluator, trainer = start("evaluate.py", "--table", table, "--timeout", 60), start("train.py", "--steps", 120)
    lines(evaluator, 3)
    for process in (evaluator, trainer):
        process.kill()
        process.communicate()
    evaluator, trainer = start("evaluate.py", "--table", table, "--timeout", 20), start("train.py", "--steps", 120)
    said, _ = evaluator.communicate(timeout=240)
    assert trainer.wait(60) == 0 and evaluator.returncode == 0
    trainer.stdout.close()
    rows = [line.split(",") for line in table.read_text().split()]
    steps = [int(step) for step, _ in rows]
    assert steps == sorted(set(steps)) and steps[-1] == 120 and len(steps) >= 5 and "evaluator: " in said
    assert float(rows[-1][1]) < float(rows[0][1])
