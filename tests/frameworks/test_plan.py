"""`nebula plan` compared with the frameworks whose numbers it uses: DeepSpeed's own estimators, configuration and autotuner, and models of transformers."""

import json
import subprocess
from pathlib import Path

import pytest
from conftest import interpreter

DEEPSPEED = ["deepspeed-0.19.6", "deepspeed-0.19.8"]


def run(environment: str, code: str, *arguments: object, cwd: Path) -> str:
    """Runs the code in .envs/<environment>. Returns its output."""
    line = [interpreter(environment), "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, cwd=cwd, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


ESTIMATORS = """
import itertools, json
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
from nebulaml.plan import memory
bad = []
for parameters, layer, gpus, nodes in itertools.product((10**6 + 7, 7 * 10**9, 405 * 10**9), (1, 10**6 + 1, 10**9), (1, 3, 8), (1, 5, 2048)):
    for offload in ("none", "optimizer"):
        told = memory.estimator(parameters, layer, 2, gpus, nodes, offload)
        host, gpu = zero2(parameters, gpus, nodes, offload != "none")
        if (int(told.gpu), int(told.host)) != (gpu, host):
            bad.append((2, parameters, layer, gpus, nodes, offload, told, gpu, host))
    for offload in ("none", "optimizer", "all"):
        told = memory.estimator(parameters, layer, 3, gpus, nodes, offload)
        host, gpu, _ = zero3(parameters, layer, gpus, nodes, offload != "none", offload == "all", True)
        if int(told.gpu) != gpu or abs(told.host - host) > 1 + 1e-9 * host:
            bad.append((3, parameters, layer, gpus, nodes, offload, told, gpu, host))
print(json.dumps([str(one) for one in bad[:3]]))
"""


@pytest.mark.parametrize("environment", DEEPSPEED)
def test_estimates_are_those_of_deepspeeds_estimators(environment, tmp_path):
    assert json.loads(run(environment, ESTIMATORS, cwd=tmp_path)) == []


AUTOTUNER = """
import json
from types import SimpleNamespace
from deepspeed.autotuning.autotuner import Autotuner
from nebulaml.plan import memory
bad = []
for parameters in (10**6, 7 * 10**9):
    for gpus, nodes in ((1, 1), (8, 4)):
        for stage in memory.STAGES:
            tuner = SimpleNamespace(get_model_num_params=lambda: parameters, exp_num_nodes=nodes, exp_num_gpus=gpus, fp16_enabled=lambda: True, mp_size=lambda: 1)
            theirs = Autotuner.get_instantiation_memory_required_per_gpu(tuner, stage)
            if abs(theirs - memory.autotuner(parameters, stage, gpus * nodes)) > 1:
                bad.append((parameters, gpus, nodes, stage, theirs))
print(json.dumps(bad))
"""


def test_the_autotuners_rule_is_its_own(tmp_path):
    assert json.loads(run("deepspeed-0.19.6", AUTOTUNER, cwd=tmp_path)) == []


ACCEPTED = """
import json, sys
import nebulaml.deepspeed  # DeepSpeed 0.19.7 and later read the section "nebula" through it
from deepspeed.runtime.config import DeepSpeedConfig
from nebulaml.plan import command
def nebula_section(config):  # DeepSpeed 0.19.7 has no field for it
    known = getattr(config, "nebula_config", None)
    return known.persistent_storage_path if known else config._param_dict["nebula"]["persistent_storage_path"]
described = []
for file, arguments in (
    ("small.json", ["--params", "100M"]), ("one.json", ["--params", "500M"]), ("two.json", ["--params", "7B", "--nodes", "4"]),
    ("three.json", ["--params", "70B", "--nodes", "32"]), ("offload.json", ["--params", "13B", "--gpus", "1", "--gpu-memory", "48G", "--host-memory", "2T"]),
):
    assert command.main([*arguments, "--write", file, "--path", "/scratch/run7"]) == 0
    config = DeepSpeedConfig(file)
    described.append([config.zero_optimization_stage, config.zero_config.offload_optimizer is not None, config.bfloat16_config.enabled,
                      config.autotuning_config.start_profile_step, config.flops_profiler_config.profile_step,
                      config.monitor_config.tensorboard.job_name, nebula_section(config)])
print(json.dumps(described))
"""


@pytest.mark.parametrize("environment", DEEPSPEED)
def test_the_written_configuration_is_one_that_deepspeed_reads(environment, tmp_path):
    described = json.loads(run(environment, ACCEPTED, cwd=tmp_path))
    assert [one[:2] for one in described] == [[0, False], [1, False], [2, False], [3, False], [3, True]]
    assert all(one[2:] == [True, 3, 5, "nebula", "/scratch/run7"] for one in described)


COUNTED = """
import json, sys, transformers
from nebulaml.plan import model
expected, counted = [], []
for kind, settings in (
    ("llama", dict(vocab_size=1000, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)),
    ("gpt2", dict(vocab_size=1000, n_embd=64, n_layer=2, n_head=4)),
    ("bert", dict(vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)),
):
    config = transformers.AutoConfig.for_model(kind, **settings)
    real = (transformers.AutoModelForCausalLM if kind != "bert" else transformers.AutoModelForMaskedLM).from_config(config)
    config.architectures = [type(real).__name__]
    config.save_pretrained(kind)
    found = model.from_config(kind)
    expected.append(sum(one.numel() for one in real.parameters()))
    counted.append(found.parameters)
    layer = max(sum({p.data_ptr(): p.numel() for p in m.parameters(recurse=False)}.values()) for m in real.modules())  # as DeepSpeed counts
    assert found.largest_layer == layer, found
print(json.dumps([expected, counted]))
"""


def test_the_parameters_of_a_config_json_are_those_of_its_model(tmp_path):
    expected, counted = json.loads(run("hf", COUNTED, cwd=tmp_path))
    assert counted == expected and min(counted) > 100_000


def test_a_config_json_that_describes_no_model_is_refused_by_name(tmp_path):
    for content, why in (("{", "cannot be read"), ("[]", "model_type"), ('{"model_type": "no-such\\u001b[31m-model"}', "cannot make a model")):
        (tmp_path / "config.json").write_text(content)
        done = subprocess.run(
            [interpreter("hf"), "-W", "ignore", "-m", "nebulaml", "plan", "--config", tmp_path], capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 2 and why in done.stderr and done.stderr.count("\n") == 1 and "\x1b" not in done.stderr, done.stderr
        assert len(done.stderr) < 500, "it lists all models of transformers"
