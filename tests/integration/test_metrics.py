"""`nebula metrics`: promtool and a parser of the format read the metrics, a dashboard and alert rules."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor

import fork_server
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from test_goodput import JOB, Job, trained  # noqa: E402
from waiting import until  # noqa: E402

parser = pytest.importorskip("prometheus_client.parser")

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = re.compile(r"\bnebula_[a-z_]+\b")


@pytest.fixture(scope="module")
def promtool():
    found = subprocess.run([ROOT / "scripts/promtool.sh"], capture_output=True, text=True)
    if found.returncode == 77:
        pytest.skip(found.stderr.strip())
    return found.stdout.strip()


@pytest.fixture
def history(tmp_path):
    job = trained()
    job.rows[3]["result"], job.rows[3]["durable"] = "failed", 0
    job.rows[4]["result"], job.rows[4]["durable"], job.rows[4]["committed"] = "failed", 0, 0
    for row in job.rows:
        row["size_bytes"], row["persist_seconds"] = 1000, 3.0
        row["tag"] = 'ev/il"\n\\\033[31m' + row["tag"]
    return job.write(tmp_path / "history.csv")


def families(text):
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def values(text):
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families(text).values()
        for sample in family.samples
    }


def test_the_numbers_are_those_of_the_history_and_no_tag_is_in_them(run, history):
    told = run("metrics", "--history", history)
    assert told.returncode == 0 and told.stderr == "" and "ev/il" not in told.stdout and "\033" not in told.stdout
    found, ledger = values(told.stdout), json.loads(run("goodput", "--history", history, "--json").stdout)
    assert (
        found["nebula_checkpoints_total", "memory", "success"] == 20
        and found["nebula_checkpoints_total", "failure", "memory"] == 1
    )
    assert (
        found["nebula_checkpoints_total", "storage", "success"] == 19
        and found["nebula_checkpoints_total", "failure", "storage"] == 1
    )
    assert found["nebula_checkpoint_last_step", "memory"] == 900
    assert (
        found["nebula_checkpoint_bytes_written_total", "storage"] == 19000
        and found["nebula_checkpoint_size_bytes",] == 1000
    )
    assert found["nebula_checkpoint_blocked_seconds_count",] == 21 and found[
        "nebula_checkpoint_blocked_seconds_sum",
    ] == pytest.approx(10.5)
    assert (
        found["nebula_checkpoint_blocked_seconds_bucket", "0.25"] == 0
        and found["nebula_checkpoint_blocked_seconds_bucket", "0.5"] == 21
    )
    assert found["nebula_checkpoint_persist_seconds_bucket", "2.5", "storage"] == 0
    assert found["nebula_checkpoint_persist_seconds_bucket", "5", "storage"] == 19
    assert (
        found["nebula_goodput_ratio",] == ledger["goodput"]
        and [found["nebula_restores_total", tier] for tier in ("memory", "peer", "storage")] == [1, 1, 0]
        and ledger["restarts"] == 2
    )
    for kind in ("blocked", "inflated", "lost", "restart"):
        assert found["nebula_badput_seconds_total", kind] == ledger["spent"][kind]
    assert found["nebula_agent_up",] == 0


# fault (The machine and other users): The clock of a node is a year ahead for some saves, and is then set back.
# result: `nebula metrics` has the time of the newest save since, so the alerts for missing checkpoints go on.
def test_a_save_in_the_future_is_not_the_last_success_for_a_year(run, tmp_path):
    job = Job(start=time.time() - 3600)
    for ahead in (0, 365 * 86400, 0):
        job.train(10)
        job.now += ahead
        job.save()
        job.now -= ahead
    last = job.rows[-1]
    last["size_bytes"] = 123
    told = values(run("metrics", "--history", job.write(tmp_path / "history.csv")).stdout)
    for tier, name in (("memory", "committed"), ("storage", "durable")):
        assert told["nebula_checkpoint_last_success_timestamp_seconds", tier] == pytest.approx(last[name])
        assert told["nebula_checkpoint_last_step", tier] == last["step"]
    assert told[("nebula_checkpoint_size_bytes",)] == 123


@pytest.mark.nightly("test_the_numbers_are_those_of_the_history_and_no_tag_is_in_them", "test_dashboard_rules_and_documentation_name_exactly_what_is_exposed")
def test_promtool_has_no_complaint(run, history, promtool):
    told = run("metrics", "--history", history)
    checked = subprocess.run([promtool, "check", "metrics"], input=told.stdout, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout + checked.stderr == ""


@pytest.mark.nightly("test_dashboard_rules_and_documentation_name_exactly_what_is_exposed")
def test_alert_rules_and_the_queries_of_the_dashboard_are_sound(promtool, tmp_path):
    checked = subprocess.run([promtool, "check", "rules", ROOT / "docs/alerts.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    queries = [
        target["expr"]
        for panel in json.loads((ROOT / "docs/grafana.json").read_text())["panels"]
        for target in panel["targets"]
    ]
    rules = [
        {"record": f"query_{i}", "expr": query.replace("$__rate_interval", "5m")} for i, query in enumerate(queries)
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))  # JSON is YAML
    checked = subprocess.run([promtool, "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True)
    assert checked.returncode == 0 and f"{len(queries)} rules found" in checked.stdout, checked.stdout + checked.stderr


# Series for promtool, a value each minute: those of a job that is well, and for each alert the values that differ when it must fire.
WELL = {
    "nebula_agent_up": "1x480",
    "nebula_world_size": "8x480",
    'nebula_job_verdict{path="/scratch"}': "0x480",
    'nebula_checkpoint_last_success_timestamp_seconds{tier="storage"}': "0+60x480",
    'nebula_checkpoint_last_success_timestamp_seconds{tier="memory"}': "0+60x480",
    'nebula_checkpoints_total{tier="storage",result="success"}': "0+1x480",
    'nebula_checkpoints_total{tier="storage",result="failure"}': "0x480",
    "nebula_storage_retries_total": "0x480",
    'nebula_storage_requests_total{store="az",operation="put",outcome="success"}': "0+100x480",
    'nebula_storage_requests_total{store="az",operation="put",outcome="failure"}': "0x480",
    'nebula_storage_request_retries_total{store="az"}': "0+1x480",
    'nebula_restores_total{tier="storage"}': "0x480",
    "nebula_checkpoint_in_progress": "1x480",
    'nebula_buffer_bytes{state="used"}': "50x480",
    'nebula_buffer_bytes{state="limit"}': "100x480",
    'nebula_checkpoint_blocked_seconds_bucket{le="0.5"}': "0+10x480",
    'nebula_checkpoint_blocked_seconds_bucket{le="10"}': "0+10x480",
    'nebula_checkpoint_blocked_seconds_bucket{le="+Inf"}': "0+10x480",
    "nebula_goodput_ratio": "0.97x480",
    "nebula_checkpoint_verified_timestamp_seconds": "0x480",
    "nebula_checkpoints_damaged": "0x480",
}
FAULTS = {
    "NebulaJobBroken": {'nebula_job_verdict{path="/scratch"}': "0x470 2x10"},
    "NebulaJobAtRisk": {'nebula_job_verdict{path="/scratch"}': "0x460 1x20"},
    "NebulaNoDurableCheckpoint": {'nebula_checkpoint_last_success_timestamp_seconds{tier="storage"}': "0+60x400 24000x80"},
    "NebulaNoCheckpoint": {'nebula_checkpoint_last_success_timestamp_seconds{tier="memory"}': "0+60x400 24000x80"},
    "NebulaCheckpointsDamaged": {"nebula_checkpoints_damaged": "1x480"},
    "NebulaMemoryRots": {'nebula_findings_total{kind="rotten"}': "0x470 1x10"},
    "NebulaValues": {'nebula_findings_total{kind="stale"}': "0x470 1x10"},
    "NebulaNotVerified": {"nebula_checkpoint_verified_timestamp_seconds": "-3000000x480"},
    "NebulaCheckpointsFail": {'nebula_checkpoints_total{tier="storage",result="failure"}': "0x470 1x10"},
    "NebulaStorageFails": {"nebula_storage_retries_total": "0x460 0+1x20"},
    "NebulaStorageRequestsFail": {'nebula_storage_requests_total{store="az",operation="put",outcome="failure"}': "0+10x480"},
    "NebulaStorageThrottles": {'nebula_storage_request_retries_total{store="az"}': "0+120x480"},
    "NebulaRestoresFromStorage": {'nebula_restores_total{tier="storage"}': "0x300 0+1x180"},
    "NebulaQueueGrows": {"nebula_checkpoint_in_progress": "1x400 3x80"},
    "NebulaMemoryFull": {'nebula_buffer_bytes{state="used"}': "50x400 99x80"},
    "NebulaSavesBlock": {'nebula_checkpoint_blocked_seconds_bucket{le="0.5"}': "0x480"},
    "NebulaGoodputLow": {"nebula_goodput_ratio": "0.97x400 0.5x80"},
    "NebulaAgentDown": {"nebula_agent_up": "1x475 0x5"},
}


ABSENT = "_x480"
STORED = 'nebula_checkpoint_last_success_timestamp_seconds{tier="storage"}'
SAVED = 'nebula_checkpoint_last_success_timestamp_seconds{tier="memory"}'
# A job that has never saved, and one that began half an hour before, where another ended hours ago. The alerts that must fire for each.
CASES = [
    ([], {}),
    *(([alert], changes) for alert, changes in FAULTS.items()),
    (["NebulaNoDurableCheckpoint"], {STORED: ABSENT}),
    (["NebulaNoCheckpoint", "NebulaNoDurableCheckpoint"], {STORED: ABSENT, SAVED: ABSENT}),
    ([], {STORED: "0+60x100 6000x379", SAVED: "0+60x100 6000x379", "nebula_world_size": "8x100 0x349 8x30"}),
    ([], {STORED: "0+60x100 6000x379", SAVED: "0+60x100 6000x379", "nebula_world_size": "_x449 8x30"}),
]


@pytest.mark.nightly("test_dashboard_rules_and_documentation_name_exactly_what_is_exposed")
def test_each_alert_fires_for_its_fault_and_none_for_a_job_that_is_well_or_has_just_begun(promtool, tmp_path):
    """Each case is an instance, because no rule joins instances: promtool evaluates the rules once for all cases."""
    series, firing = [], []
    for number, (alerts, changes) in enumerate(CASES):
        label = f'instance="{number}: {" ".join(alerts)}"'
        for name, value in {**WELL, **changes}.items():
            series.append({"series": name.replace("{", f"{{{label},") if "{" in name else f"{name}{{{label}}}", "values": value})
        firing += [{"labels": f'{{alertname="{alert}",{label}}}', "value": 1} for alert in alerts]
    query = {"expr": 'count by (alertname, instance) (ALERTS{alertstate="firing"})', "eval_time": "479m", "exp_samples": firing}
    rules = ROOT / "docs/alerts.yml"
    assert sorted(FAULTS) == sorted(re.findall(r"- alert: (\w+)", rules.read_text()))
    file = tmp_path / "cases.yml"
    cases = [{"interval": "1m", "input_series": series, "promql_expr_test": [query]}]
    file.write_text(json.dumps({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": cases}))  # JSON is YAML
    checked = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def left_out(ours, theirs, where=""):
    """Returns the parts of the first that the second lacks."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            yield from left_out(value, theirs.get(name), f"{where}/{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from left_out(one, other, f"{where}[{at}]")
    elif ours != theirs:
        yield where


def test_the_dashboard_is_what_grafanas_schema_knows():
    """The classes are generated from Grafana's schema. They drop a field or a kind of panel that it does not have."""
    dashboard = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    ours = json.loads((ROOT / "docs/grafana.json").read_text())

    def lost(document):
        return list(left_out(document, json.loads(encoder.JSONEncoder().encode(dashboard.Dashboard.from_json(document)))))

    assert lost(ours) == []
    assert lost(ours | {"panles": []}) == ["/panles"]
    places = [panel["gridPos"] for panel in ours["panels"]]
    taken = {(x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
    assert len(taken) == sum(at["w"] * at["h"] for at in places) and max(x for x, _ in taken) < 24  # none lies on another
    assert len({panel["id"] for panel in ours["panels"]}) == len(places)


# Exposed while a rank counts steps: test_hangs.py.
OF_STEPS = {"nebula_step", "nebula_seconds_since_step", "nebula_step_limit_seconds", "nebula_hangs_total"}


@pytest.fixture
def live(nebula, tmp_path):
    """A job that has resumed from storage, because its agent had ended, and then from memory. The agent still runs."""
    pytest.importorskip("nebulaml")
    name = uuid.uuid4().hex[:8]
    runtime, memory = pathlib.Path(f"/tmp/nb-{name}"), pathlib.Path(f"/dev/shm/nb-{name}")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("NEBULA_")} | {
        "NEBULA_RUNTIME_DIR": str(runtime),
        "NEBULA_MEMORY_DIR": str(memory),
        "NEBULA_OUTPUT_DIR": str(tmp_path / "output"),
        "NEBULA_AGENT_PATH": str(nebula),
    }
    try:
        fork_server.start(JOB, tmp_path / "store", 10, "kill", env=environment).communicate(timeout=120)
        subprocess.run([nebula, "stop"], env=environment, capture_output=True, timeout=60, check=True)
        subprocess.run([nebula, "verify", "--path", tmp_path / "store"], env=environment, capture_output=True, timeout=60, check=True)
        for steps in (15, 20):
            resumed = fork_server.start(JOB, tmp_path / "store", steps, env=environment)
            resumed.communicate(timeout=120)
            assert resumed.returncode == 0
        yield environment, tmp_path / "store"
    finally:
        subprocess.run([nebula, "stop", "--now", "--yes"], env=environment, capture_output=True, timeout=60)
        for path in (runtime, memory):
            shutil.rmtree(path, ignore_errors=True)


def test_dashboard_rules_and_documentation_name_exactly_what_is_exposed(live, nebula):
    environment, store = live
    for _ in range(50):  # lines of the history are written after the versions
        told = subprocess.run(
            [nebula, "metrics", "--path", store],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        if values(told.stdout).get(("nebula_checkpoint_last_step", "storage")) == 20:
            break
        time.sleep(0.2)
    found = values(told.stdout)
    assert (
        found["nebula_agent_up",] == 1
        and found["nebula_buffer_bytes", "limit"] > 0
        and found["nebula_checkpoint_in_progress",] == 0
    )
    assert found["nebula_checkpoint_last_step", "storage"] == 20
    assert [found["nebula_restores_total", tier] for tier in ("memory", "peer", "storage")] == [1, 0, 1]
    assert found["nebula_storage_requests_total", "file", "success", "upload"] >= 2  # by the agent that still runs
    assert found["nebula_storage_bytes_total", "file", "written"] > 2 * 4000 and found["nebula_storage_request_retries_total", "file"] == 0
    exposed = {sample for family in families(told.stdout).values() for sample in (item.name for item in family.samples)}
    bases = {
        re.sub("_(bucket|sum|count)$", "", name)
        if name.startswith(("nebula_checkpoint_blocked", "nebula_checkpoint_persist"))
        else name
        for name in exposed
    }
    for file in ("docs/grafana.json", "docs/alerts.yml"):
        used = set(NAME.findall((ROOT / file).read_text()))
        assert used and used <= exposed, used - exposed
    table = (ROOT / "docs/operate.md").read_text().split("| metric |")[1].split("\n\n")[0]
    assert set(NAME.findall(table)) - OF_STEPS == bases - OF_STEPS


# A file $HANGS cannot be opened while the file $WHILE exists.
HANG = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int open_late(const char *path, int flags, va_list list)
{
        int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");

        while (!strcmp(path, getenv("HANGS")) && !access(getenv("WHILE"), F_OK))
                usleep(10000);
        return real(path, flags, va_arg(list, int));
}

#define OPEN(name)                                       \
        int name(const char *path, int flags, ...)       \
        {                                                \
                va_list list;                            \
                int fd;                                  \
                                                         \
                va_start(list, flags);                   \
                fd = open_late(path, flags, list);       \
                va_end(list);                            \
                return fd;                               \
        }
OPEN(open)
OPEN(open64)
"""


# fault (Storage): Storage hangs while Prometheus asks a node for its metrics.
# result: The agent's metrics come, with the verdict on the job. Those of the history are as they were.
def test_metrics_come_while_storage_hangs(nebula, history, tmp_path):
    (tmp_path / "hang.c").write_text(HANG)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", tmp_path / "hang.so", tmp_path / "hang.c", "-ldl"], check=True)
    hanging = tmp_path / "hanging"
    environment = os.environ | {"LD_PRELOAD": str(tmp_path / "hang.so"), "HANGS": str(history), "WHILE": str(hanging)}
    line = [nebula, "metrics", "--listen", "0", "--history", history]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env=environment) as serving:
        try:
            address = serving.stdout.readline().strip()

            def scrape(_=None):
                with urllib.request.urlopen(address, timeout=300) as answer:
                    return values(answer.read().decode())

            before = scrape()
            assert ("nebula_goodput_ratio",) in before
            hanging.touch()
            with ThreadPoolExecutor(20) as clients:  # more than the server has threads
                for told in clients.map(scrape, range(20)):
                    assert told == before
            history.write_text("")
            hanging.unlink()
            until(lambda: ("nebula_goodput_ratio",) not in scrape(), 60, "the numbers of now")
        finally:
            serving.kill()


# fault (Reports): Many clients connect to the metrics of a node and send half a request.
# result: Prometheus gets its answer in the time that it waits.
def test_clients_that_send_half_a_request_hold_up_no_scrape(nebula, history):
    line = [nebula, "metrics", "--listen", "0", "--history", history]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as serving:
        halves = []
        try:
            address = serving.stdout.readline().strip()
            port = int(address.split(":")[2].split("/")[0])
            for _ in range(60):
                halves.append(socket.create_connection(("127.0.0.1", port)))
                halves[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
            with urllib.request.urlopen(address, timeout=10) as answer:
                assert "nebula_goodput_ratio" in families(answer.read().decode())
        finally:
            for one in halves:
                one.close()
            serving.kill()


def test_only_metrics_is_served_and_only_to_this_machine(nebula, history):
    serving = subprocess.Popen(
        [nebula, "metrics", "--listen", "0", "--history", history], stdout=subprocess.PIPE, text=True
    )
    try:
        address = serving.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", address)
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "nebula_goodput_ratio" in families(answer.read().decode())
        for method, path, status in (
            ("GET", "/", 404),
            ("GET", "/metrics/../x", 404),
            ("POST", "/metrics", 405),
            ("DELETE", "/metrics", 405),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(
                    urllib.request.Request(
                        address[: -len("/metrics")] + path, b"x" if method == "POST" else None, method=method
                    ),
                    timeout=30,
                )
            assert refused.value.code == status
        port = int(address.split(":")[2].split("/")[0])
        idle = [
            socket.create_connection(("127.0.0.1", port)) for _ in range(4)
        ]  # clients that send nothing block no other client
        assert urllib.request.urlopen(address, timeout=30).status == 200
        for one in idle:
            one.close()
        addresses = {
            line.split()[1]
            for name in ("tcp", "tcp6")
            for line in pathlib.Path(f"/proc/net/{name}").read_text().splitlines()[1:]
            if line.split()[3] == "0A"
        }
        assert {one.split(":")[0] for one in addresses if one.endswith(f":{port:04X}")} == {"0100007F"}
    finally:
        serving.send_signal(signal.SIGINT)
        serving.wait(60)


@pytest.mark.parametrize("address", ["x", "70000", "localhost:1", "1.2.3.4.5:1", ":", "[::1]", "[::1]:x"])
def test_a_wrong_address_is_exit_2(run, address):
    told = run("metrics", "--listen", address)
    assert told.returncode == 2 and "--listen takes" in told.stderr


def test_a_file_in_a_directory_that_is_missing_is_an_error_that_names_the_directory(run, history, tmp_path):
    told = run("metrics", "--textfile", tmp_path / "missing" / "nebula.prom", "--history", history)
    assert told.returncode == 4 and f"cannot make a file in {tmp_path}/missing: No such file or directory" in told.stderr


def test_a_file_for_node_exporter_is_replaced_as_a_whole(run, nebula, history, tmp_path):
    (tmp_path / "nebula.prom").write_text("before")
    assert run("metrics", "--textfile", "nebula.prom", "--history", history).returncode == 0
    assert "nebula_goodput_ratio" in families((tmp_path / "nebula.prom").read_text())
    assert [path.name for path in tmp_path.glob("*.prom*")] == ["nebula.prom"]
    assert (tmp_path / "nebula.prom").stat().st_mode & 0o444 == 0o444 & ~os.umask(os.umask(0o22) or 0)
    writing = subprocess.Popen(
        [nebula, "metrics", "--textfile", "nebula.prom", "--every", "1", "--history", history], cwd=tmp_path
    )
    try:
        inodes = set()
        deadline = time.monotonic() + 60
        while len(inodes) < 3 and time.monotonic() < deadline:
            assert (tmp_path / "nebula.prom").read_text().endswith("\n")
            inodes.add((tmp_path / "nebula.prom").stat().st_mtime_ns)
            time.sleep(0.05)
        assert len(inodes) == 3
    finally:
        writing.send_signal(signal.SIGINT)
        writing.wait(60)
    failed = run("metrics", "--textfile", "absent/nebula.prom", "--history", history)
    assert failed.returncode in (3, 4) and failed.stderr.count("\n") == 1


def test_the_file_is_written_again_once_its_directory_is_back(nebula, history, tmp_path):
    there, away = tmp_path / "there", tmp_path / "away"
    there.mkdir()
    line = [nebula, "metrics", "--textfile", there / "nebula.prom", "--every", "1", "--history", history]
    writing = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    try:
        until((there / "nebula.prom").exists)
        there.rename(away)
        assert str(there) in writing.stderr.readline()
        there.mkdir()
        until((there / "nebula.prom").exists)
        assert writing.poll() is None
    finally:
        writing.send_signal(signal.SIGINT)
        assert writing.communicate(timeout=60)[1] == ""


def test_metrics_that_a_full_disk_did_not_take_are_no_success(nebula, history):
    with open("/dev/full", "w") as full:
        told = subprocess.run([nebula, "metrics", "--history", history], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (told.returncode, told.stderr) == (4, "nebula: cannot write the output\n")


def test_the_unit_and_the_daemon_set_give_the_command_a_line_that_it_takes(nebula, tmp_path):
    unit = re.search(r"ExecStart=/usr/bin/nebula (.*)", (ROOT / "docs/nebula-metrics.service").read_text())[1].split()
    pod = re.search(r"command: \[nebula, (.*)\]", (ROOT / "docs/nebula-metrics.yaml").read_text())[1].replace('"', "").split(", ")
    for line in (unit, pod):
        assert line[:2] == ["metrics", "--listen"] and line[3] == "--path", line
        serving = subprocess.Popen([nebula, line[0], line[1], "0", line[3], tmp_path], stdout=subprocess.PIPE, text=True)
        assert serving.stdout.readline().endswith("/metrics\n")
        serving.kill()
        serving.wait()
