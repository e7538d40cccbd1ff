"""`nebula plan`: its formulas are compared with a simulator that does not use them, its numbers with published ones, and bad input is refused."""

import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from nebulaml._session import locate
from nebulaml.errors import NebulaConfigError, NebulaStorageError
from nebulaml.plan import command, failures, interval, memory, model, planning

HOUR = 3600.0
WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # a smaller failing job would say no more, and the simulator is slow


def simulate(costs: interval.Costs, memory_s: float, storage_s: float, count: int, seed: int) -> float:
    """Returns the share of the time that is progress in a job with so many failures. It simulates the job event by event: training, blocked saves, persists,
    failures, also during a resume."""
    dice = random.Random(seed)
    now = progress = 0.0
    in_memory = durable = 0.0  # the progress that each tier's newest version holds
    captured: list[tuple[float, float]] = []  # (when it is complete in memory, its progress)
    persisting: tuple[float, float] | None = None  # (when it is durable, its progress)
    last_persist = 0.0
    for _ in range(count):
        failure = now + dice.expovariate(1 / costs.mtbf_s)
        since_save = 0.0
        # Training until the failure.
        while True:
            until_save = max(memory_s, costs.captured_s) - since_save
            if now + until_save >= failure:
                progress += failure - now
                now = failure
                break
            now += until_save
            progress += until_save
            since_save = 0.0
            if now + costs.blocked_s >= failure:
                now = failure
                break
            now += costs.blocked_s
            captured.append((now + costs.captured_s, progress))
            while captured and captured[0][0] <= now:
                in_memory = captured.pop(0)[1]
            if persisting and persisting[0] <= now:
                durable, persisting = persisting[1], None
            if persisting is None and now - last_persist >= storage_s:
                # The training time that a persist costs is subtracted at once.
                persisting, last_persist = (now + costs.durable_s, progress), now
                now = min(now + costs.slowdown_s, failure)
                if now >= failure:
                    break
        # The failure, and those during the resume.
        lost = False
        while True:
            while captured and captured[0][0] <= now:
                in_memory = captured.pop(0)[1]
            if persisting and persisting[0] <= now:
                durable, persisting = persisting[1], None
            captured.clear()
            if dice.random() >= costs.survives:
                lost = True
                in_memory, persisting = durable, None
            resume = costs.resume_storage_s if lost else costs.resume_memory_s
            again = dice.expovariate(1 / costs.mtbf_s)
            if again > resume:
                now += resume
                break
            now += again
        progress = in_memory
    return progress / now


@pytest.mark.parametrize(
    ("mtbf", "blocked", "lag", "resume", "every", "share"),
    [
        # The states of the art, from the table of the interval theory: exact form, and Monte Carlo of another author's simulator.
        (3.09 * HOUR, 120, 0, 600, 1634, 0.8149),
        (3.09 * HOUR, 1, 120, 600, 149, 0.9248),
        (3.09 * HOUR, 1, 600, 600, 600, 0.8723),
        (7.9 * HOUR, 1, 300, 300, 300, 0.9707),
        (7.9 * HOUR, 300, 0, 300, 4131, 0.8525),
        (0.23 * HOUR, 1, 60, 120, 60, 0.7626),
        (0.23 * HOUR, 60, 0, 120, 315, 0.5745),
        (1 * HOUR, 2, 30, 90, 120, 0.9353),
    ],
)
def test_one_tier_is_the_known_figure_and_the_simulators(mtbf, blocked, lag, resume, every, share):
    assert interval.one_tier(every, blocked, lag, resume, mtbf) == pytest.approx(share, abs=0.002)
    costs = interval.Costs(mtbf, 1.0, blocked, lag, 0.0, 0.0, resume, resume)
    assert simulate(costs, every, math.inf, 3000, 1) == pytest.approx(share, abs=0.008)


costs_strategy = st.builds(
    interval.Costs,
    mtbf_s=st.floats(1 * HOUR, 30 * HOUR),
    survives=st.floats(0.0, 1.0),
    blocked_s=st.floats(0.5, 20),
    captured_s=st.floats(0, 20),
    slowdown_s=st.floats(0.1, 20),
    durable_s=st.floats(1, 400),
    resume_memory_s=st.floats(10, 600),
    resume_storage_s=st.floats(100, 900),
)


@settings(max_examples=40 if os.environ.get("NEBULA_TEST_NIGHTLY") else 5, deadline=None, phases=WITHOUT_SHRINKING)
@given(costs_strategy)
def test_goodput_of_two_tiers_is_the_simulators(costs):
    memory_s, storage_s = interval.intervals(costs)
    assert interval.goodput(costs, memory_s, storage_s) == pytest.approx(simulate(costs, memory_s, storage_s, 1500, 7), abs=0.012)


@settings(max_examples=40, deadline=None, phases=WITHOUT_SHRINKING)
@given(costs_strategy)
def test_no_other_interval_is_much_better(costs):
    memory_s, storage_s = interval.intervals(costs)
    best = interval.goodput(costs, memory_s, storage_s)
    for i in range(-12, 13):
        for j in range(-12, 13):
            other_memory, other_storage = memory_s * 1.3**i, storage_s * 1.3**j
            if other_memory >= costs.captured_s and other_storage >= max(costs.durable_s, other_memory):
                assert interval.goodput(costs, other_memory, other_storage) <= best + 0.006


@pytest.mark.nightly("test_goodput_of_two_tiers_is_the_simulators")
def test_the_simulator_too_finds_the_interval_best():
    costs = interval.Costs(2 * HOUR, 0.6, 5.0, 5.0, 10.0, 60.0, 60.0, 300.0)
    memory_s, storage_s = interval.intervals(costs)
    best = simulate(costs, memory_s, storage_s, 8000, 3)
    for factor in (0.1, 10):
        assert simulate(costs, memory_s * factor, max(storage_s, memory_s * factor), 8000, 3) < best - 0.01
    assert simulate(costs, memory_s, storage_s * 10, 8000, 3) < best - 0.01


def test_young_and_daly_are_as_published():
    assert interval.young(120, 3.09 * HOUR) == pytest.approx(1634, abs=1)
    assert interval.daly(120, 3.09 * HOUR) == pytest.approx(1555, abs=2)
    assert interval.daly(10, 4) == 4


def test_failure_rates_are_those_that_their_sources_report():
    assert failures.job_mtbf_s(failures.PRESETS["llama3"], 2048) / HOUR == pytest.approx(3.09, abs=0.01)
    assert failures.job_mtbf_s(failures.PRESETS["rsc"], 128) / HOUR == pytest.approx(7.9, abs=0.1)
    assert failures.job_mtbf_s(failures.PRESETS["rsc"], 2048) / HOUR == pytest.approx(1.8, abs=0.3)
    assert failures.job_mtbf_s(failures.PRESETS["rsc"], 1) / HOUR / 24 == pytest.approx(47.7, rel=0.15)
    assert failures.job_mtbf_s(failures.PRESETS["spot"], 40) == HOUR
    for preset in failures.PRESETS.values():
        assert preset.source and 0 <= preset.local <= preset.with_replica <= 1


@given(st.integers(1, 10**12), st.integers(1, 16), st.integers(1, 4096))
def test_the_parts_of_the_stages_add_up(parameters, gpus_per_node, nodes):
    gpus = gpus_per_node * nodes
    assert memory.guide(parameters, 0, gpus) == 20 * parameters
    shares = [memory.guide(parameters, stage, gpus) for stage in memory.STAGES]
    assert shares == sorted(shares, reverse=True) and shares[3] * gpus == pytest.approx(20 * parameters)
    tuned = [memory.autotuner(parameters, stage, gpus) for stage in memory.STAGES]
    assert tuned == pytest.approx(shares, rel=0.6) and tuned == sorted(tuned, reverse=True)
    for stage in memory.STAGES:
        rank, node, total = memory.checkpoint(parameters, stage, gpus_per_node, nodes)
        assert total == 14 * parameters and rank <= node * (1 + 1e-9) and node <= total * (1 + 1e-9)
        if nodes == 1:
            assert node == pytest.approx(total)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = command.main([str(one) for one in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def told(capsys, *arguments):
    code, out, _ = run(capsys, "--json", *arguments)
    return code, json.loads(out)


def test_the_times_of_launchers_are_those_of_the_bench_and_count(capsys):
    rows = [line.split("|")[1:-1] for line in (Path(__file__).resolve().parents[2] / "bench/results/recover.md").read_text().splitlines() if line.startswith("| ")]
    measured = {(row[0].strip(), row[1].strip(" `")): [float(cell.strip(" *")) for cell in row[2:]] for row in rows if row[2].strip().startswith("**") and len(row) == 11}
    for name, key in (("nebula-run", ("silence", "nebula run")), ("torchrun", ("node", "torchrun"))):
        whole, _, _, noticed, _, _, _, restore, _ = measured[key]
        launcher = failures.LAUNCHERS[name]
        assert launcher.detect_s == pytest.approx(noticed, abs=0.05) and launcher.restart_s == pytest.approx(whole - noticed - restore, abs=0.05)
    job = ("--params", "405B", "--nodes", 2048, "--gpu-memory", "80G", "--overlap", "--storage-write", "2G")
    plans = {name: told(capsys, *job, "--launcher", name)[1] for name in failures.LAUNCHERS}
    assert plans["nebula-run"]["inputs"]["detect_s"]["value"] == 2.2 and "recover.md" in plans["nebula-run"]["inputs"]["detect_s"]["source"]
    best = {name: max(way["goodput"] for way in plan["ways"]) for name, plan in plans.items()}
    assert best["nebula-run"] > best["torchrun"] > best["scheduler"]


def test_a_plan_names_each_number_and_where_it_comes_from(capsys):
    code, plan = told(capsys, "--params", "7B", "--nodes", 4, "--gpu-memory", "80G", "--mtbf", "12h", "--storage-write", "2G", "--step-time", "5s")
    assert code == 0 and plan["fits"] and plan["short"] == []
    assert plan["job"]["parameters"] == 7_000_000_000 and plan["job"]["gpus"] == 32
    assert plan["inputs"]["mtbf_s"] == {"value": 43200.0, "source": "given"}
    assert plan["inputs"]["write_rate"] == {"value": 2.0 * (1 << 30), "source": "given"}
    assert plan["inputs"]["copy_rate"]["source"] == "assumed" and plan["inputs"]["storage_space"]["value"] is None
    assert [one["stage"] for one in plan["memory"]["stages"]] == [0, 1, 2, 3]
    assert plan["stage"]["stage"] == 2 and plan["memory"]["stages"][2]["estimator_bytes"] == 2 * 7e9 + int(18 * 7e9 / 32)
    assert plan["checkpoint"]["total_bytes"] == 14 * 7e9
    # Rank 0's node also writes the weights. Two versions of it, because a save comes before the last one is durable, and two for a peer.
    assert plan["ways"][2]["memory_interval_s"] < plan["ways"][2]["storage_interval_s"] and plan["job"]["versions_in_memory"] == 2
    assert plan["checkpoint"]["node_bytes"] == pytest.approx(12 * 7e9 / 4 + 2 * 7e9)
    assert plan["checkpoint"]["node_memory_bytes"] == pytest.approx(4 * plan["checkpoint"]["node_bytes"])
    assert plan["times"]["durable_s"] == pytest.approx(plan["checkpoint"]["node_bytes"] / (2 << 30))
    goodput = {one["name"]: one["goodput"] for one in plan["ways"]}
    assert goodput["torch.save"] < goodput["Nebula"] < goodput["Nebula, copies on peers"] < 1
    assert plan["storage"]["cost_per_month_usd"] == pytest.approx(4 * 98 * 0.018)
    code, text, _ = run(capsys, "--params", "7B", "--nodes", 4, "--step-time", "5s")
    assert code == 0 and "steps" in text and "<- use this" in text and "the guide's 20 bytes" in text and "DeepSpeed 0.19.6" in text


def test_a_job_whose_versions_are_durable_before_the_next_save_needs_memory_for_one(capsys):
    job = ("--params", "7B", "--nodes", 1, "--survives", 0, "--storage-write", "2G")
    code, plan = told(capsys, *job)
    assert code == 0 and plan["ways"][1]["memory_interval_s"] == plan["ways"][1]["storage_interval_s"] > plan["times"]["durable_s"]
    assert plan["job"]["versions_in_memory"] == 1 and plan["checkpoint"]["node_memory_bytes"] == plan["checkpoint"]["node_bytes"]
    assert "a version of its share" in run(capsys, *job)[1]
    room = f"{math.ceil(plan['checkpoint']['node_bytes'] / 2**30)}G"
    assert told(capsys, *job, "--host-memory", room)[0] == 0 and told(capsys, *job, "--host-memory", room, "--survives", 0.99)[0] == 1


def test_a_plan_that_does_not_fit_says_which_number_is_short_and_by_how_much(capsys):
    code, out, err = run(capsys, "--params", "70B", "--nodes", 1, "--gpu-memory", "40G", "--host-memory", "4T", "--stage", 3)
    need = 4 * 1.4e9 + 18 * 70e9 / 8 + 8 * 2**30
    assert code == 1 and f"short by {(need / 2**30 - 40):.1f} GiB" in out and "memory of a GPU at stage 3" in err
    advised = int(out.split("; ")[-1].split(" nodes of this kind")[0])
    assert told(capsys, "--params", "70B", "--nodes", advised, "--gpu-memory", "40G", "--host-memory", "4T", "--stage", 3)[0] == 0
    assert told(capsys, "--params", "70B", "--nodes", advised - 1, "--gpu-memory", "40G", "--host-memory", "4T", "--stage", 3)[0] == 1
    code, plan = told(capsys, "--params", "7B", "--nodes", 2, "--host-memory", "150G")
    assert code == 1 and [one["name"] for one in plan["short"]] == ["host memory of a node"] and "--replicas 0" in plan["short"][0]["advice"]
    assert told(capsys, "--params", "7B", "--nodes", 2, "--host-memory", "150G", "--replicas", 0)[0] == 0
    code, plan = told(capsys, "--params", "7B", "--storage-space", "100G")
    assert [one["name"] for one in plan["short"]] == ["storage"] and plan["short"][0]["short_by"] == pytest.approx(4 * 98e9 - 100 * 2**30)
    code, plan = told(capsys, "--params", "7B", "--mtbf", "2m")
    assert code == 1 and plan["short"][0]["name"] == "time between failures"


@pytest.mark.parametrize(
    ("arguments", "name", "need"),
    [
        (["--failures", "spot", "--storage-write", "1M"], "storage write", 98e9 / HOUR),
        (["--failures", "spot", "--nodes", 4, "--replicas", 0, "--storage-total", "1M"], "storage of all nodes", 98e9 / HOUR),
        (["--mtbf", "1h", "--copy", "1M"], "memory copy", 98e9 / HOUR),
        (["--mtbf", "1h", "--blocked", "2h"], "time between failures", 2 * HOUR),
    ],
)
def test_a_rate_at_which_no_save_ends_before_the_next_failure_is_short(capsys, arguments, name, need):
    code, plan = told(capsys, "--params", "7B", *arguments)
    short = [one for one in plan["short"] if one["name"] == name]
    assert code == 1 and len(short) == 1 and short[0]["need"] == pytest.approx(need), plan["short"]
    if short[0]["unit"] == "bytes/s":
        option = {"storage write": "--storage-write", "storage of all nodes": "--storage-total", "memory copy": "--copy"}[name]
        enough = told(capsys, "--params", "7B", *arguments, option, math.ceil(1.01 * need))[1]
        assert name not in [one["name"] for one in enough["short"]]
        assert "/s: short by" in run(capsys, "--params", "7B", *arguments)[2]


def test_memory_survives_no_less_with_copies_on_peers(capsys):
    plan = told(capsys, "--params", "7B", "--nodes", 2, "--survives", 1)[1]
    assert plan["inputs"]["survives_replica"]["value"] == 1


def test_storage_that_all_nodes_share_slows_what_they_do_together(capsys):
    code, plan = told(capsys, "--params", "70B", "--nodes", 16, "--storage-total", "4G", "--storage-write", "2G", "--storage-read", "2G")
    assert code == 0 and plan["times"]["durable_s"] == pytest.approx(14 * 70e9 / (4 << 30))
    assert plan["times"]["resume_storage_s"] == pytest.approx(360 + 14 * 70e9 / (4 << 30))


def test_copies_for_peers_count_when_a_stage_is_chosen(capsys):
    """At stage 2 rank 0's node also has all weights: with copies of a peer's that is too much, and stage 3 spreads them."""
    size = ["--params", "7B", "--nodes", 8, "--host-memory", "70G"]
    assert told(capsys, *size, "--replicas", 0)[1]["stage"]["stage"] == 2
    code, plan = told(capsys, *size, "--replicas", 1)
    assert code == 0 and plan["stage"]["stage"] == 3


def test_offload_is_planned_when_the_gpus_alone_are_too_small(capsys):
    code, plan = told(capsys, "--params", "13B", "--gpus", 1, "--gpu-memory", "48G", "--host-memory", "2T")
    assert code == 0 and plan["stage"]["stage"] == 3 and plan["stage"]["offload"] in ("optimizer", "all") and plan["stage"]["host_bytes"] > 0


@settings(max_examples=60, deadline=None)
@given(
    st.integers(10**6, 10**12), st.integers(1, 2048), st.integers(1, 16), st.floats(1, 1e7), st.floats(1e6, 1e12), st.booleans()
)
def test_any_job_has_a_plan_of_finite_numbers(parameters, nodes, gpus, mtbf, rate, overlap):
    given_ = ["--params", str(parameters), "--nodes", str(nodes), "--gpus", str(gpus), "--mtbf", f"{mtbf:.3f}s", "--storage-write", f"{rate:.0f}B"]
    plan = planning.make(command._job(command._parser().parse_args([*given_, *(["--overlap"] if overlap else [])])))
    document = json.loads(json.dumps(planning.document(plan), allow_nan=False))
    assert all(0 <= one["goodput"] < 1 for one in document["ways"]) and document["storage"]["cost_per_month_usd"] >= 0
    assert (document["fits"] is False) == bool(document["short"]) and all(one["short_by"] > 0 for one in document["short"])


INVALID = [
    ([], "--params N, or --config"),
    (["--params", "lots"], "number of parameters"),
    (["--params", "0"], "number of parameters"),
    (["--params", "7B", "--nodes", "0"], "whole number"),
    (["--params", "7B", "--gpu-memory", "eighty"], "--gpu-memory"),
    (["--params", "7B", "--copy", "0"], "--copy '0' is too small: give bytes per second, 1 or more"),
    (["--params", "-7B"], "--params '-7B' is negative: give a number of parameters from 1 to 1000T"),
    (["--params", "--json"], "--params: expected one argument"),
    (["--params", "7B", "--survives", "1.5"], "from 0 to 1"),
    (["--params", "7B", "--mtbf", "-1"], "mtbf"),
    (["--params", "7B", "--replicas", "1"], "no peer"),
    (["--params", "7B", "--nodes", "2", "--replicas", "2"], "has room for 1"),
    (["--params", "7B", "--survives", "0.9", "--survives-with-replica", "0.1"], "less than --survives 0.9"),
    (["--params", "7B", "--largest-layer", "8B"], "whole model has 7B"),
    (["--config", "config.json", "--largest-layer", "8B"], "belongs to --params"),
    (["--params", "7B", "--measure", "--limits", "limits.json"], "give one of them"),
    (["--params", ""], "number of parameters"),
    (["--config", "/nowhere/\x1b[31m\u202e\n"], "\\x1b[31m\\u202e"),
    (["--params", "7B", "--failures", "luck"], "luck"),
    (["--params", "7B", "--config", "config.json"], "--params N, or --config"),
    (["--config", "/nowhere/config.json"], "does not exist"),
    (["--params", "7B", "--limits", "/nowhere"], "does not exist"),
    (["--params", "7B", "--goodput", "/nowhere"], "does not exist"),
    (["--params", "7B", "--shiny"], "--shiny"),
    (["--params", "--"], "unrecognized arguments: --"),
]
DAILY = 3  # of them in `make test`


@pytest.mark.parametrize(("arguments", "why"), [*INVALID[:DAILY], *(pytest.param(*one, marks=pytest.mark.nightly("test_an_invalid_command_line_is_refused_with_one_sentence")) for one in INVALID[DAILY:])])
def test_an_invalid_command_line_is_refused_with_one_sentence(arguments, why):
    result = subprocess.run([sys.executable, "-m", "nebulaml", "plan", *arguments], capture_output=True, text=True)
    assert result.returncode == (3 if "does not exist" in result.stderr else 2), result.stderr
    assert why in result.stderr and result.stderr.count("\n") == 1 and result.stderr.strip().isprintable(), result.stderr


NUMBERS = {
    "a number of parameters from 1 to 1000T, such as 350M, 7B or 6738415616": ["params", "largest-layer"],
    "a whole number from 1 to 1000000": ["nodes", "gpus", "keep-last"],
    "a whole number from 0 to 8": ["replicas"],
    "a whole number from 0 to 3": ["stage"],
    "a size of 1 byte or more, such as 512M, 80G or 1T": ["gpu-memory", "host-memory", "storage-space"],
    "a size of 0 or more, such as 512M or 16G": ["activations"],
    "bytes per second, 1 or more, such as 500M or 4G": ["copy", "storage-write", "storage-read", "storage-total"],
    "Mbit/s, 0.001 or more, such as 100000": ["network"],
    "azure, s3, gcs, none, or dollars of a GB and month, 0 or more, such as 0.02": ["storage-price"],
    "a number from 0 to 1, such as 0.02": ["slowdown", "survives", "survives-with-replica"],
    "a time of 0.001ms or more, such as 250ms, 100 or 15m": ["mtbf", "step-time"],
    "a time of 0 or more, such as 250ms, 100 or 15m": ["blocked", "detect", "restart"],
}
FAULTS = {
    "": "is empty", "  ": "is empty", "-7": "is negative", "-1e400": "is negative", "nan": "is not finite", "-nan": "is not finite", "inf": "is not finite",
    "-Infinity": "is not finite", "1e400": "is too large", "1e300": "is too large", "seven": "is not a number", "7 7": "is not a number", ".": "is not a number",
    "0x10": "is not a number", "1_0": "is not a number", "\u0663": "is not a number", "--7": "is not a number", "-": "is not a number", "1,5": "is not a number",
}  # fmt: skip


def refusal(option, value):
    with pytest.raises(NebulaConfigError) as told:
        command.main([*([] if option == "params" else ["--params", "7B"]), f"--{option}", value])
    return str(told.value)


@pytest.mark.parametrize(("accepted", "option"), [(accepted, one) for accepted, options in NUMBERS.items() for one in options])
def test_a_wrong_number_is_refused_with_its_fault_and_what_is_accepted(accepted, option):
    faults = dict(FAULTS)
    if "parameters" in accepted:
        faults = {value: fault for value, fault in faults.items() if value not in ("1_0", "1,5")} | {"K": "is a unit without a number", "7Q": "has the unknown unit 'Q'"}
    if "size" in accepted or "bytes" in accepted:
        faults |= {"80": "has no unit", "1048575": "has no unit", "GiB": "is a unit without a number", "1 iB": "has the unknown unit 'IB'", "7days": "has the unknown unit 'DAYS'"}
    if "time" in accepted:
        faults |= {"ms": "is a unit without a number", "7G": "has the unknown unit 'G'"}
    if "whole" in accepted:
        faults |= {"1.5": "is not a whole number", "1M": "has a unit", "1000001": "is too large"}
    if "0 or more" not in accepted and "from 0" not in accepted:
        faults |= {"0": "is too small"}
    for value, fault in faults.items():
        name = value.replace(",", "").replace("_", "") if "parameters" in accepted else value
        assert refusal(option, value) == f"--{option} {name!r} {fault}: give {accepted}"
    assert len(refusal(option, "9" * 100_000)) < 200


def test_the_least_and_the_largest_numbers_have_a_plan_of_finite_numbers(capsys):
    ends = {
        "params": ["1", "1000T"], "nodes": ["1", "1000000"], "gpus": ["1", "1000000"], "keep-last": ["1", "1000000"], "gpu-memory": ["1B", "1e9T"], "host-memory": ["1B", "1e9T"],
        "storage-space": ["1B", "1e9T"], "activations": ["0", "1e9T"], "copy": ["1B", "1e9T"], "storage-write": ["1B", "1e9T"], "storage-read": ["1B", "1e9T"],
        "storage-total": ["1B", "1e9T"], "network": ["0.001", "1e15"], "storage-price": ["0", "1e9"], "slowdown": ["0", "1"], "survives": ["0", "1"],
        "survives-with-replica": ["1"], "mtbf": ["0.001ms", "1e12"], "step-time": ["0.001ms", "1e12"], "blocked": ["0", "1e12"], "detect": ["0", "1e12"], "restart": ["0", "1e12"],
    }  # fmt: skip
    for option, values in ends.items():
        for value in values:
            arguments = {"params": "7B", "nodes": "4", option: value}
            assert command.main([*(word for name, one in arguments.items() for word in ("--" + name, one)), "--json"]) in (0, 1)
            told = capsys.readouterr().out
            json.loads(told, parse_constant=lambda constant, given=arguments: pytest.fail(f"{given}: {constant}"))
            assert command.main([word for name, one in arguments.items() for word in ("--" + name, one)]) in (0, 1)
            shown = capsys.readouterr().out
            assert " nan" not in shown and " inf" not in shown, (arguments, shown)


def test_the_configuration_is_written_once(capsys, tmp_path):
    file = tmp_path / "ds_config.json"
    assert run(capsys, "--params", "7B", "--write", file, "--path", "/scratch/run7")[0] == 0
    written = json.loads(file.read_text())
    assert written["nebula"]["persistent_storage_path"] == "/scratch/run7" and written["zero_optimization"]["stage"] == 2
    assert {"autotuning", "flops_profiler", "tensorboard"} <= written.keys()
    with pytest.raises(NebulaConfigError, match="exists"):
        command.main(["--params", "7B", "--write", str(file)])
    assert run(capsys, "--params", "70B", "--nodes", 8, "--write", file, "--force")[0] == 0
    assert json.loads(file.read_text())["zero_optimization"]["stage"] == 3
    other = tmp_path / "other.json"
    assert run(capsys, "--params", "70B", "--stage", 0, "--write", other)[0] == 1 and not other.exists()


# fault (Arguments of the caller): The disk for the DeepSpeed configuration that `nebula plan --write --force` replaces is full.
# result: The configuration stays as it was.
def test_a_configuration_that_cannot_be_written_whole_leaves_the_one_before(capsys, tmp_path):
    file, limits = tmp_path / "ds_config.json", resource.getrlimit(resource.RLIMIT_FSIZE)
    file.write_text("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        for arguments in (["--write", str(file), "--force"], ["--write", str(tmp_path / "new.json")]):
            with pytest.raises(NebulaStorageError, match="File too large"):
                command.main(["--params", "7B", *arguments])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["ds_config.json"]


@pytest.mark.nightly
def test_the_picture_is_one(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(capsys, "--params", "7B", "--nodes", 4, "--plot", tmp_path / "plan.png")[0] == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(NebulaConfigError, match="picture"):
        command.main(["--params", "7B", "--plot", str(tmp_path / "plan.picture")])


def test_what_a_job_has_shown_is_taken_from_its_ledger_and_an_option_comes_first(capsys, tmp_path):
    spent, job = tmp_path / "spent.json", ("--params", "7B", "--nodes", 2)
    ledger = {"wall_seconds": 9000.0, "restarts": 4, "saves": 100, "step_seconds": 2.0, "restart_seconds": 30.0, "notice_seconds": 5.0}
    ledger["spent"] = {"blocked": 50.0, "paused": 1000.0}
    spent.write_text(json.dumps(ledger))
    _, plan = told(capsys, *job, "--goodput", spent)
    names = {"mtbf_s": 2000.0, "detect_s": 5.0, "restart_s": 30.0, "blocked_s": 0.5}
    assert {name: plan["inputs"][name]["value"] for name in names} == names
    assert {plan["inputs"][name]["source"] for name in names} == {f"measured ({spent})"}
    _, others = told(capsys, *job, "--goodput", spent, "--detect", "1s", "--mtbf", "9h", "--blocked", "1s")
    assert [others["inputs"][name]["value"] for name in names] == [9 * HOUR, 1.0, 30.0, 1.0]
    ledger |= {"restarts": 0, "restart_seconds": 0.0, "notice_seconds": None, "step_seconds": 0}  # nothing has failed
    spent.write_text(json.dumps(ledger))
    _, plan = told(capsys, *job, "--goodput", spent)
    _, without = told(capsys, *job, "--blocked", "0.5s")
    assert all(plan["inputs"][name]["value"] == without["inputs"][name]["value"] for name in names)
    spent.write_text("{}")
    with pytest.raises(NebulaConfigError, match="holds no ledger"):
        command.main(["--params", "7B", "--goodput", str(spent)])


@pytest.mark.nightly
def test_limits_of_a_machine_are_measured_and_taken(capsys, tmp_path):
    code, plan = told(capsys, "--params", "125M", "--measure", "--path", tmp_path / "store", "--gpus", 1)
    for name in ("copy_rate", "write_rate", "read_rate", "host_memory"):
        assert plan["inputs"][name]["source"].startswith("measured") and plan["inputs"][name]["value"] > 1e6
    assert not list((tmp_path / "store").iterdir()), "the measurement left something behind"
    saved = tmp_path / "limits.json"
    saved.write_text(json.dumps({"limits": {"copy_bytes_per_s": 5e9, "write_bytes_per_s": None, "free_memory_bytes": 64 << 30}}))
    code, plan = told(capsys, "--params", "125M", "--gpus", 1, "--limits", saved)
    assert code == 0 and plan["inputs"]["copy_rate"]["value"] == 5e9 and plan["inputs"]["write_rate"]["source"] == "assumed"
    saved.write_text('{"limits": {"copy_bytes_per_s": 1e400, "write_bytes_per_s": -5}}')
    with pytest.raises(NebulaConfigError, match=r"copy_bytes_per_s, measured \(.*\), 'inf' is not finite: give bytes per second"):
        command.main(["--params", "7B", "--limits", str(saved)])
    saved.write_text("[]")
    with pytest.raises(NebulaConfigError, match="no limits"):
        command.main(["--params", "7B", "--limits", str(saved)])


@pytest.mark.parametrize(("text", "number"), [("7B", 7e9), ("1.3b", 1.3e9), ("350M", 350e6), ("6_738_415_616", 6738415616), ("1T", 1e12), ("7e9", 7e9), (" .5 k", 500), ("+1,000", 1000)])
def test_numbers_of_parameters(text, number):
    assert model.from_count(text).parameters == number


def nebula() -> str:
    return os.environ.get("NEBULA_AGENT_PATH") or str(locate.agent_path())


def test_the_command_runs_the_package_of_its_python():
    result = subprocess.run([nebula(), "plan", "--params", "7B", "--json"], capture_output=True, text=True, env={**os.environ, "NEBULA_PYTHON": sys.executable})
    assert result.returncode == 0 and json.loads(result.stdout)["fits"], result.stderr


def test_a_missing_package_is_named(tmp_path: Path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    (tmp_path / "nebulaml").mkdir()  # a folder of that name in the working directory is no package of ours
    result = subprocess.run(
        [nebula(), "plan", "--params", "7B"], capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "NEBULA_PYTHON": str(bare)}
    )
    assert result.returncode == 4 and "part of the Python package nebulaml" in result.stderr and result.stderr.count("\n") == 1
    result = subprocess.run([nebula(), "plan", "--params", "7B"], capture_output=True, text=True, env={**os.environ, "NEBULA_PYTHON": "/nowhere/python"})
    assert result.returncode == 4 and "cannot be started" in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_plan_that_a_full_disk_does_not_take_is_one_sentence(more):
    with open("/dev/full", "w") as full:
        told = subprocess.run([sys.executable, "-m", "nebulaml", "plan", "--params", "7B", *more], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (told.returncode, told.stderr) == (4, "nebula: the output cannot be written: No space left on device\n")


def test_the_bandwidth_that_storage_must_take_is_printed_with_its_average(capsys):
    size = ["--params", "405B", "--nodes", 2048]
    storage = told(capsys, *size)[1]["storage"]
    assert storage["write_bytes_per_s"] == storage["read_bytes_per_s"] == 2048e9
    assert 1e10 < storage["average_write_bytes_per_s"] < 1e11
    text = run(capsys, *size)[1]
    assert re.search(r"storage takes +1\.9 TiB/s  from 2048 nodes at once, .* on average; a resume reads 1\.9 TiB/s; hardly any storage takes so much; --storage-total gives what yours takes", text)
    limited = run(capsys, *size, "--storage-total", "100G")[1]
    assert re.search(r"storage takes +100\.0 GiB/s  from 2048 nodes at once", limited) and "--storage-total gives" not in limited


def test_a_plan_says_that_it_assumes_one_node(capsys):
    text = run(capsys, "--params", "7B")[1]
    assert text.startswith("7B parameters on 8 GPUs, 1 node of 8, assumed: give --nodes\n") and "assumed: --nodes" in text and "assumed: --gpus" in text
    text = run(capsys, "--params", "7B", "--nodes", 1, "--gpus", 8)[1]
    assert text.startswith("7B parameters on 8 GPUs, 1 node of 8\n") and "assumed: --" not in text
    assert told(capsys, "--params", "7B", "--nodes", 2)[1]["job"]["assumed"] == ["gpus"]


def test_a_reader_that_ends_early_ends_the_command_as_it_ends_cat():
    pipe = subprocess.Popen([sys.executable, "-m", "nebulaml", "plan", "--params", "7B"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pipe.stdout.close()
    assert (pipe.stderr.read(), pipe.wait(60)) == (b"", -signal.SIGPIPE)
