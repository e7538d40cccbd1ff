"""JAX without torch: pytrees of sharded arrays, several processes, other meshes, donated buffers."""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import nebulaml
import pytest
from conftest import interpreter
from ports import held_port

BEGIN = """
    import os, sys

    class NoTorch:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise ModuleNotFoundError("torch is not to be imported", name=name)

    sys.meta_path.insert(0, NoTorch())
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_num_cpu_devices", int(os.environ.get("DEVICES", "8")))
    from jax.sharding import NamedSharding, PartitionSpec as P
    import nebulaml as nm, nebulaml.jax as nj

    def say(*words):
        print(*words, flush=True)

    def plain(leaf):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return np.asarray(jax.random.key_data(leaf))
        return np.asarray(repr(leaf)) if isinstance(leaf, int) and leaf > 1 << 62 else np.asarray(leaf)

    def same(a, b):
        pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        return jax.tree.structure(a) == jax.tree.structure(b) and all(
            x.tobytes() == y.tobytes() and x.dtype == y.dtype for x, y in ((plain(one), plain(other)) for one, other in pairs)
        )
"""


@pytest.fixture
def jax(node):
    python = interpreter("jax")
    package = str(Path(nebulaml.__file__).parent.parent)

    def run(code, *arguments, check=True, **variables):
        environment = {**node.environment, "PYTHONPATH": package, "JAX_PLATFORMS": "cpu", **variables}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environment.pop(name, None)
        command = [python, "-c", textwrap.dedent(BEGIN) + textwrap.dedent(code), str(node.persist), *map(str, arguments)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if not check:
            return process
        said, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        return said.split("\n")[:-1]

    return run


def test_a_tree_of_all_kinds_of_leaves_comes_back_exactly_on_another_mesh(jax):
    said = jax("""
        mesh, other = jax.make_mesh((4, 2), ("x", "y")), jax.make_mesh((2, 4), ("x", "y"))
        at = lambda spec, mesh=mesh: NamedSharding(mesh, spec)
        tree = {
            "rows": jax.device_put(jnp.arange(64.0).reshape(8, 8), at(P("x", "y"))), "whole": jax.device_put(jnp.arange(5), at(P())),
            "half": jax.device_put(jnp.arange(16.0).reshape(8, 2), at(P("y"))), "bf16": jnp.arange(7).astype(jnp.bfloat16),
            "f8": jnp.arange(4).astype(jnp.float8_e4m3fn), "i4": jnp.arange(-8, 8).astype(jnp.int4), "key": jax.random.key(3),
            "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4), "old": jax.random.PRNGKey(2), "empty": jnp.zeros((0, 3)), "scalar": jnp.float32(0.1),
            "numpy": np.arange(6).reshape(2, 3)[:, ::2], "plain": (1, 2.5, None, "text", 3 + 4j, b"bytes", True, float("nan"), 10**30), "nothing": {}, "no": None,
        }
        nj.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("global_step1") as checkpoint:
            nj.save(checkpoint, "state", tree)
        checkpoint.wait("durable", 120)
        for template in (tree, {**tree, "rows": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=at(P("y", "x"), other)),
                                "half": jax.ShapeDtypeStruct((8, 2), jnp.float32)}):
            found = nj.load(nm.get_latest_checkpoint(), "state", template)
            say(same(found, tree), found["rows"].sharding == template["rows"].sharding, jax.random.key_impl(found["keys"]))
        say(nj.load(nm.get_latest_checkpoint(), "state", {"bf16": jnp.zeros(7, jnp.float32)}, cast=True)["bf16"].dtype, sum(checkpoint.files.values()) < 5000)
    """)
    assert said == ["True True rbg"] * 2 + ["float32 True"]


def test_values_are_those_of_the_save_although_their_buffers_are_donated(jax):
    said = jax("""
        step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2 + 1, tree), donate_argnums=0)
        tree = {str(i): jnp.full((1 << 20,), float(i)) for i in range(8)}
        nj.init(sys.argv[1], 0, on_error="raise")
        for number in range(1, 6):
            wanted = jax.tree.map(lambda x: np.array(x), tree)
            with nm.Checkpoint(f"global_step{number}") as checkpoint:
                nj.save(checkpoint, "state", tree)
            for _ in range(3):
                tree = step(tree)
            jax.block_until_ready(tree)
            say(same(nj.load(nm.get_checkpoint(f"global_step{number}"), "state", wanted), wanted))
    """)
    assert said == ["True"] * 5


TRAIN = """
    import flax.linen as nn, optax
    from flax.training.train_state import TrainState

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(nn.gelu(nn.Dense(64)(x)))

    mesh = jax.make_mesh((8,), ("data",))
    net = Net()
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), jnp.ones((1, 16))), tx=optax.adamw(1e-2))
    state = jax.device_put(state.replace(step=jnp.int32(0)), NamedSharding(mesh, P()))

    @jax.jit
    def train(state, key):
        x = jax.random.normal(key, (32, 16))
        loss, grads = jax.value_and_grad(lambda params: jnp.mean((net.apply(params, x) - x.sum(1, keepdims=True)) ** 2))(state.params)
        return state.apply_gradients(grads=grads), loss

    nj.init(sys.argv[1], 0, on_error="raise")
    latest = nm.get_latest_checkpoint()
    if latest is not None:
        state = nj.load(latest, "state", state)
    for step in range(int(state.step) + 1, 31):
        state, loss = train(state, jax.random.key(step))
        say(step, float(loss).hex())
        if step % 5 == 0:
            with nm.Checkpoint(f"global_step{step}") as checkpoint:
                nj.save(checkpoint, "state", state)
        if str(step) == sys.argv[2]:
            os.kill(os.getpid(), 9)
"""


def test_a_flax_job_that_was_killed_goes_on_with_the_same_losses(jax, node):
    whole = dict(line.split() for line in jax(TRAIN.replace("sys.argv[1]", "sys.argv[1] + '-whole'"), 0))
    killed = jax(TRAIN, 17, check=False)
    said, errors = killed.communicate(timeout=240)
    assert killed.returncode == -9, errors
    before = dict(line.split() for line in said.strip().split("\n"))
    after = dict(line.split() for line in jax(TRAIN, 0))
    assert min(map(int, after)) == 16 and len(whole) == 30
    assert before == {step: loss for step, loss in whole.items() if int(step) <= 17}
    assert after == {step: loss for step, loss in whole.items() if int(step) >= 16}


PROCESSES = """
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", int(sys.argv[3]), int(sys.argv[4]))
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    split = NamedSharding(mesh, P("x"))
    whole = np.arange(1024.0, dtype=np.float32).reshape(64, 16)
    tree = {"w": jax.make_array_from_callback(whole.shape, split, lambda index: whole[index]), "step": 7,
            "r": jax.make_array_from_callback((5,), NamedSharding(mesh, P()), lambda index: np.arange(5.0, dtype=np.float32)[index])}
    nj.init(sys.argv[1], 0, on_error="raise")
    if sys.argv[5] == "save":
        checkpoint = nm.Checkpoint("global_step7", -2)
        nj.save(checkpoint, "state", tree)
        checkpoint.commit()
        checkpoint.wait("durable", 120)
    found = nj.load(nm.get_latest_checkpoint(), "state", tree)
    good = all(np.array_equal(np.asarray(shard.data), whole[shard.index]) for shard in found["w"].addressable_shards)
    say(good and len(found["w"].addressable_shards) == jax.local_device_count(), found["step"], np.asarray(found["r"].addressable_shards[0].data).tolist())
"""


def run_all(jax, port, count, what, devices):
    processes = [jax(PROCESSES, port, count, number, what, check=False, DEVICES=str(devices)) for number in range(count)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs
    return [said.strip().split("\n")[-1] for said, _ in outputs]


def test_processes_write_each_shard_once_and_another_number_of_processes_reads_them(jax, node):
    held = held_port(), held_port()
    try:
        ports = [one.getsockname()[1] for one in held]
        for one in held:
            one.close()
        line = "True 7 [0.0, 1.0, 2.0, 3.0, 4.0]"
        assert run_all(jax, ports[0], 2, "save", 2) == [line] * 2
        sizes = {path.name: path.stat().st_size for path in node.persist.glob("global_step7/*.data")}
        assert len(sizes) == 2 and sum(sizes.values()) < 64 * 16 * 4 + 200
        assert run_all(jax, ports[1], 1, "load", 4) == [line]
    finally:
        for one in held:
            one.close()


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{'w': jnp.zeros((2, 3))}", "['w'] has the shape (4,), and the template (2, 3)"),
        ("{'w': jnp.zeros(4, jnp.int32)}", "['w'] is float32, and the template int32: cast=True converts"),
        ("{'v': jnp.zeros(4)}", "has no ['v']"), ("{'k': jnp.zeros(4)}", "['k'] is a PRNG key on one side alone"),
        ("{'t': jnp.zeros(4)}", "['t'] is a Python str"), ("{'w': 5}", "['w'] has the shape (4,), and the template a int"),
    ],
)  # fmt: skip
def test_a_template_that_does_not_fit_is_refused_with_the_path(jax, template, why):
    said = jax(f"""
        nj.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("a") as checkpoint:
            nj.save(checkpoint, "state", {{"w": jnp.zeros(4), "k": jax.random.key(1), "t": "text"}})
        try:
            nj.load(nm.get_latest_checkpoint(), "state", {template})
        except (nm.NebulaConfigError, nm.NebulaNotFound) as failure:
            say(str(failure))
        try:
            with nm.Checkpoint("b") as checkpoint:
                nj.save(checkpoint, "state", {{"f": jnp.sin}})
        except nm.NebulaConfigError as failure:
            say(str(failure))
        say(nm.get_checkpoint("b"))
    """)
    assert why in said[0] and "['f'] is a" in said[1] and said[2] == "None"


def test_sessions_managers_and_commands_need_no_torch(jax, node):
    said = jax("""
        import json
        nm.init(sys.argv[1], 0, on_error="raise", keep_last=2)
        for step in range(1, 5):
            with nm.Checkpoint(f"global_step{step}", metrics={"loss": 1 / step}) as checkpoint:
                checkpoint.save_bytes("x", [b"abc", np.arange(4.0)])
        nm.flush_persistence()
        latest = nm.get_latest_checkpoint()
        with nm.Reader(sys.argv[1]) as reader:
            say(latest.read_bytes("x")[:3], latest.metrics, reader.latest().tag, len(nm.checkpoints()) >= 2)
        for name in ("Manager", "Reader", "Subscriber", "ElasticSampler", "MetricsLog"):
            try:
                getattr(nm, name)
            except ImportError as failure:
                say(name, failure)
    """)
    assert said[0] == "b'abc' {'loss': 0.25} global_step4 True", said
    assert [line.split()[0] for line in said[1:]] in ([], ["Manager"], ["Manager", "ElasticSampler"]), said
    assert json.dumps(os.listdir(node.persist)).count("global_step") == 2


MANAGED = """
    import orbax.checkpoint as ocp

    class Numbers:  # as Grain's DatasetIterator
        def __init__(self):
            self.at = 0
        def __next__(self):
            self.at += 1
            return self.at
        def get_state(self):
            return {"at": self.at}
        def set_state(self, state):
            self.at = state["at"]

    class Bytes(Numbers):  # as Grain's older DataLoader iterator
        def get_state(self):
            return b"at %d" % self.at
        def set_state(self, state):
            self.at = int(state[3:])

    options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=2)
    with nj.Manager(sys.argv[1], **nj.settings_of(options), keep_best=nm.Best("loss")) as manager:
        state, data, more = {"w": jnp.zeros(8), "step": 0}, Numbers(), Bytes()
        restored = manager.restore({"state": state, "data": data, "more": more})
        if restored is not None:
            say("restored", restored.step, restored.metrics, restored.items["state"]["w"][0], data.at, more.at, restored.items["data"] is data)
            state = restored.items["state"]
        for step in range(restored.step + 1 if restored else 1, 23):
            next(data), next(more)
            state = {"w": state["w"] + 1, "step": step}
            manager.save(step, {"state": state, "data": data, "more": more}, metrics={"loss": abs(step - 5)})
            if restored is None and step == 17:
                manager.wait()
                os.kill(os.getpid(), 9)
        manager.wait()
        say(manager.all_steps(), manager.latest_step(), manager.best_step())
        say(manager.restore({"state": {"w": jnp.zeros(8)}}, step=5).items["state"]["w"][0])
        for wrong in ({"nothing": state}, {"state": Numbers()}, {"state": {"w": jnp.zeros(9)}}):
            try:
                manager.restore(wrong)
            except nm.NebulaError as failure:
                say(type(failure).__name__)
        for refused in ({"best_fn": len}, {"todelete_subdir": "x"}, {"step_prefix": "x"}):
            try:
                say(nj.settings_of(ocp.CheckpointManagerOptions(**refused)))
            except nm.NebulaConfigError as failure:
                say(str(failure).split("of ")[1].split("=")[0])
"""


def test_a_manager_of_trees_and_iterators_goes_on_after_sigkill_with_orbaxs_options(jax):
    killed = jax(MANAGED, check=False)
    said, errors = killed.communicate(timeout=240)
    assert killed.returncode == -9 and said == "", errors
    assert jax(MANAGED) == [
        "restored 15 {'loss': 10.0} 15.0 15 15 True", "[5, 15, 20] 20 5", "5.0", "NebulaNotFound", "NebulaNotFound", "NebulaConfigError",
        "best_fn", "todelete_subdir", "step_prefix",
    ]  # fmt: skip
