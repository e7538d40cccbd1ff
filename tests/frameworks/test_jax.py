"""JAX without torch: pytrees of sharded arrays, several processes, other meshes, donated buffers, Orbax's checkpoints and its managers."""

import contextlib
import json
import os
import re
import subprocess
import textwrap
from pathlib import Path

import nebulaml
import pytest
from conftest import ROOT, full, interpreter
from ports import held_port
from processes import stop

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

    def run(code, *arguments, check=True, file=None, **variables):
        environment = {**node.environment, "PYTHONPATH": package, "JAX_PLATFORMS": "cpu"}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NEBULA_RUN"):
            environment.pop(name, None)
        environment |= variables
        program = ["-c", textwrap.dedent(BEGIN) + textwrap.dedent(code), str(node.persist)] if file is None else [str(file)]
        command = [python, *program, *map(str, arguments)]
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


def test_weak_types_come_back_so_a_jitted_function_is_not_compiled_again(jax):
    said = jax("""
        mesh = jax.make_mesh((8,), ("x",))
        tree = {"rate": jnp.asarray(0.5), "spread": jax.device_put(jnp.asarray(2), NamedSharding(mesh, P())), "strong": jnp.float32(1)}
        step = jax.jit(lambda tree: {name: value * jnp.bfloat16(2) for name, value in tree.items()})
        before = step(tree)
        nj.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("global_step1") as checkpoint:
            nj.save(checkpoint, "state", tree)
        for template in (tree, jax.eval_shape(lambda: tree), None):
            found = nj.load(nm.get_latest_checkpoint(), "state", template)
            say(*(found[name].weak_type for name in sorted(found)), same(step(found), before))
        found = nj.load(nm.get_latest_checkpoint(), "state", tree)
        count = step._cache_size()
        say(same(step(found), before), step._cache_size() == count)
    """)
    assert said == ["True True False True"] * 3 + ["True True"]


def test_states_of_flax_optax_and_equinox_come_back_in_the_form_of_an_abstract_tree(jax):
    said = jax("""
        import collections, dataclasses, equinox as eqx, flax.linen as nn, optax
        from flax.training.train_state import TrainState

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Data:
            values: jax.Array
            name: str = dataclasses.field(metadata={"static": True})

        Pair = collections.namedtuple("Pair", "a b")
        mesh = jax.make_mesh((8,), ("x",))
        net = nn.Dense(8)
        tx = optax.MultiSteps(optax.chain(optax.clip(1.0), optax.masked(optax.adamw(1e-3), {"kernel": True, "bias": False})), 2)
        begin = lambda: TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), jnp.ones((1, 4)))["params"], tx=tx)
        state = begin()
        for _ in range(3):
            state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
        module, static = eqx.partition(eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(1)), eqx.is_array)
        odd = {1: jnp.ones(1), "1": jnp.zeros(2), "a.b": 5, "a": {"b": 6}, "a/b": 7, "": {"": 8}, "['a']": 9}
        tree = {"state": state, "module": module, "data": Data(jnp.arange(3.0), "static"), "pair": Pair(jnp.zeros(1), None), "odd": {str(k): k for k in odd}}
        nj.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("global_step1") as checkpoint:
            nj.save(checkpoint, "state", tree)
            nj.save(checkpoint, "odd", [(key, value) for key, value in odd.items()] + [{1: 1.5, 2: jnp.ones(1)}, {"1": 2.5, "2": jnp.zeros(1)}])
        latest = nm.get_latest_checkpoint()
        found = nj.load(latest, "state", tree)
        far = jax.device_put(jnp.ones(3), jax.devices()[5])
        say((found["data"].values + far).sharding == far.sharding)  # neither is bound to the device of the save
        say(same(found, tree), eqx.combine(found["module"], static)(jnp.ones(4)).shape, found["state"].step, type(found["pair"]).__name__)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P())), jax.eval_shape(begin)
        )
        found = nj.load(latest, "state", {"state": abstract})["state"]
        say(jax.tree.structure(found) == jax.tree.structure(state), int(found.step), type(found.opt_state.inner_opt_state[1].inner_state[0].mu["bias"]).__name__)
        say(found.params["kernel"].sharding == NamedSharding(mesh, P()), np.array_equal(found.opt_state.acc_grads["kernel"], state.opt_state.acc_grads["kernel"]))
        part = nj.load(latest, "odd", [(key, value) for key, value in odd.items()])
        say(part[2:], part[0][1].shape, part[1][1].shape)

        class Key:  # two of them have one text
            def __lt__(self, other):
                return id(self) < id(other)
            def __repr__(self):
                return "key"

        try:
            nj.save(nm.Checkpoint("twice"), "state", {Key(): 1, Key(): 2})
        except nm.NebulaConfigError as failure:
            say(failure)
    """)
    assert said == [
        "True", "True (2,) 3 Pair", "True 3 MaskedNode", "True True",
        "[('a.b', 5), ('a', {'b': 6}), ('a/b', 7), ('', {'': 8}), (\"['a']\", 9)] (1,) (2,)",
        "'state' has several leaves that would have one name: [['Key', 'key']]",
    ]  # fmt: skip


def test_each_save_writes_the_tree_that_it_is_given_although_the_last_one_of_that_name_was_another(jax):
    """A save goes on with the layout of the last one. Whatever differs between the two must be noticed."""
    said = jax("""
        import collections
        from jax.experimental.layout import Format, Layout
        mesh = jax.make_mesh((4, 2), ("x", "y"))
        at = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
        rows, Pair = jnp.arange(64.0).reshape(8, 8), collections.namedtuple("Pair", "w b")
        trees = [
            {"w": at(rows, "x"), "n": 1}, {"w": at(rows + 1, "x"), "n": 2}, {"w": at(rows, "y"), "n": 2}, {"w": at(rows), "n": 2}, {"w": rows, "n": 2},
            {"w": rows, "n": 2.0}, {"w": rows, "n": True}, {"w": rows, "n": "2"}, {"w": rows, "n": np.int32(2)}, {"w": rows, "n": np.int64(2)},
            {"w": rows, "n": np.arange(3)}, {"w": rows, "n": np.arange(4)}, {"w": np.asarray(rows), "n": np.arange(4)[::-1]}, {"w": rows[:4], "n": None},
            {"w": rows.reshape(4, 16), "n": None}, {"w": rows.astype(jnp.int32), "n": None}, {"w": rows.astype(jnp.bfloat16), "n": None},
            {"w": rows.astype(jnp.bfloat16) + 1, "n": None}, {"w": jnp.arange(64).astype(jnp.int4), "n": None}, {"w": rows > 3, "n": None},
            {"w": jnp.asarray(0.5), "n": None}, {"w": jnp.float32(0.5), "n": None}, {"w": jax.random.key(1), "n": None}, {"w": jax.random.key(2), "n": None},
            {"w": jax.random.key(2, impl="rbg"), "n": None}, {"w": jax.random.PRNGKey(2), "n": None}, {"w": rows, "n": None, "v": rows}, {"w": rows, "x": rows},
            Pair(rows, None), [rows, None], {1: rows}, {True: rows}, {"1": rows}, {(1, 2): rows}, {(True, 2.0): rows}, {"1": {"1": rows}}, {}, rows, at(rows, ("x", "y")),
            jax.device_put(rows, Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(jax.devices()[0]))), at(jnp.zeros((0, 8)), "x"), rows.astype(jnp.complex64),
        ]
        nj.init(sys.argv[1], 0, on_error="raise")
        def saved(tree, number):
            with nm.Checkpoint(f"global_step{number}") as checkpoint:
                nj.save(checkpoint, "state", tree)
            latest = nm.get_latest_checkpoint()
            found, paths = nj.load(latest, "state", tree), [path for path, leaf in nj.leaves.leaves_of(tree) if not nj.leaves.is_empty(leaf)]
            weak = lambda tree: [getattr(leaf, "weak_type", None) for leaf in jax.tree.leaves(tree)]
            types = lambda tree: [np.ndarray if isinstance(leaf, np.generic) else type(leaf) for leaf in jax.tree.leaves(tree)]
            exact = same(found, tree) and types(found) == types(tree) and weak(found) == weak(tree) and list(nj.loading.Saved(latest, "state").leaves) == paths
            nm.flush_persistence()
            return exact
        wrong = [number for number, tree in enumerate([*trees, *reversed(trees), *trees[::3], *trees[1::3]]) if not saved(tree, number)]
        say(*wrong or ["all"])
        step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
        donated = step({"w": at(rows, "x"), "v": rows, "h": at(rows.astype(jnp.bfloat16), "x", "y")})
        for number in range(200, 206):
            wanted = jax.tree.map(lambda x: np.array(x), donated)
            with nm.Checkpoint(f"global_step{number}") as checkpoint:
                nj.save(checkpoint, "state", donated)
            donated = step(donated)
            say(same(nj.load(nm.get_latest_checkpoint(), "state", wanted), wanted))
            nm.flush_persistence()
        deleted = jax.tree.map(lambda x: x + 1, donated)
        jax.tree.map(lambda x: x.delete(), deleted)
        for broken in (deleted, {**donated, "v": object()}):
            try:
                nj.save(nm.Checkpoint("global_step300"), "state", broken)
            except (RuntimeError, nm.NebulaConfigError) as failure:
                say(type(failure).__name__)
        say(saved(donated, 301))
    """)
    assert said == ["all", *["True"] * 6, "RuntimeError", "NebulaConfigError", "True"]


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
            checkpoint.wait("committed", 60)  # a kill while its bytes are copied would lose it
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


@pytest.mark.parametrize("store", ["s3", "gs"])
def test_a_flax_job_that_was_killed_goes_on_from_an_object_store_when_its_memory_is_lost(jax, node, servers, store):
    node.use(servers, store)
    killed = jax(TRAIN, 17, check=False)
    said, errors = killed.communicate(timeout=240)
    assert killed.returncode == -9, errors
    node.wait_durable("global_step15")
    node.forget_memory()
    before = dict(line.split() for line in said.strip().split("\n"))
    after = dict(line.split() for line in jax(TRAIN, 0))
    assert min(map(int, after)) == 16 and len(after) == 15
    assert [after["16"], after["17"]] == [before["16"], before["17"]]


@full
def test_the_example_goes_on_after_sigkill_with_the_same_losses(jax, node):
    example = ROOT / "examples/jax/train.py"
    small = ["--path", node.persist, "--width", 16, "--layers", 1, "--batch", 4, "--steps", 6]
    killed = jax(None, *small, "--save-every", 2, "--kill-at", 5, check=False, file=example)
    said, errors = killed.communicate(timeout=240)
    assert killed.returncode == -9, errors
    before = said.split("\n")
    after = jax(None, *small, "--save-every", 1, file=example)
    assert after[0] == "resumed after step 4" and after[1] == before[2] and after[1].startswith("step 5 loss")
    assert len(after) == 3


PROCESSES = """
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", int(sys.argv[3]), int(sys.argv[4]))
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    split = NamedSharding(mesh, P("x"))
    whole = np.arange(1024.0, dtype=np.float32).reshape(64, 16)
    own = {"mine": jnp.full(2, jax.process_index()), "key": jax.random.key(jax.process_index())}
    tree = {"w": jax.make_array_from_callback(whole.shape, split, lambda index: whole[index]), "step": 7, "own": own,
            "r": jax.make_array_from_callback((5,), NamedSharding(mesh, P()), lambda index: np.arange(5.0, dtype=np.float32)[index])}
    data = np.arange(8, dtype=np.uint32).reshape(4, 2)
    tree["keys"] = jax.random.wrap_key_data(jax.make_array_from_callback(data.shape, split, lambda index: data[index]))
    last = jax.sharding.Mesh(np.array([each for each in jax.devices() if each.process_index == jax.process_count() - 1]), ("x",))
    line = lambda index: np.arange(4.0, dtype=np.float32)[index]
    tree["stage"] = jax.make_array_from_callback((4,), NamedSharding(last, P("x")), line, dtype=np.float32)
    tree["mixed"] = 5 if jax.process_index() == 0 else jnp.ones(1)
    nj.init(sys.argv[1], 0, on_error="raise")
    if sys.argv[5] == "save":
        checkpoint = nm.Checkpoint("global_step7", -2)
        nj.save(checkpoint, "state", tree)
        checkpoint.commit()
        checkpoint.wait("durable", 120)
    found = nj.load(nm.get_latest_checkpoint(), "state", tree)
    good = all(np.array_equal(np.asarray(shard.data), whole[shard.index]) for shard in found["w"].addressable_shards)
    keys = [jax.random.key_data(shard.data) for shard in found["keys"].addressable_shards]
    good = good and all(np.array_equal(key, data[shard.index]) for key, shard in zip(keys, found["keys"].addressable_shards))
    good = good and all(np.array_equal(shard.data, line(shard.index)) for shard in found["stage"].addressable_shards)
    number = jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda index: np.int32(0))
    good = good and int(nj.load(nm.get_latest_checkpoint(), "state", {"step": number})["step"].addressable_data(0)) == 7
    say(good and len(found["w"].addressable_shards) == jax.local_device_count(), found["step"], np.asarray(found["r"].addressable_shards[0].data).tolist(),
        same(found["own"], own), nj.load(nm.get_latest_checkpoint(), "state")["own"]["mine"].tolist() == [jax.process_index()] * 2)
    if sys.argv[5] == "save":  # process 1 dies before it has saved its part of the next one, and process 0 after that
        if sys.argv[4] == "0":
            try:
                with nm.Checkpoint("global_step8", -2) as checkpoint:
                    nj.save(checkpoint, "state", {**tree, "step": 8})
                checkpoint.wait("captured", 60)
            except nm.NebulaError:  # the agent has seen the end of process 1 while this one still copied
                pass
        os.kill(os.getpid(), 9)
"""


def run_all(jax, port, count, what, devices, code=0):
    processes = [jax(PROCESSES, port, count, number, what, check=False, DEVICES=str(devices)) for number in range(count)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert all(process.returncode == code for process in processes), outputs
    return [said.strip().split("\n")[-1] for said, _ in outputs]


def test_processes_write_each_shard_once_and_another_number_of_them_reads_the_last_that_all_have_saved_before_they_were_killed(jax, node):
    held = held_port(), held_port()
    try:
        ports = [one.getsockname()[1] for one in held]
        for one in held:
            one.close()
        line = "True 7 [0.0, 1.0, 2.0, 3.0, 4.0] True True"
        assert run_all(jax, ports[0], 2, "save", 2, code=-9) == [line] * 2
        sizes = {path.name: path.stat().st_size for path in node.persist.glob("global_step7/*.tree")}
        assert len(sizes) == 2 and sum(sizes.values()) < 64 * 16 * 4 + 2 * 1800
        assert run_all(jax, ports[1], 1, "load", 4) == [line]
    finally:
        for one in held:
            one.close()


NODES = """
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    tree = lambda step: {"w": jax.make_array_from_callback((16,), NamedSharding(mesh, P("x")), lambda index: np.arange(16.0, dtype=np.float32)[index] + step)}
    nj.init(sys.argv[1], 3600, on_error="raise")
    latest = nm.get_latest_checkpoint()
    values = lambda tree: [np.asarray(shard.data).tolist() for shard in tree["w"].addressable_shards]
    say(latest and latest.step, latest and nm.Manager(sys.argv[1]).latest_step(), latest and values(nj.load(latest, "state", tree(0))) == values(tree(latest.step)))
    for step, state in ((1, "durable"), (2, "committed")):
        with nm.Checkpoint(f"global_step{step}", -2) as checkpoint:
            nj.save(checkpoint, "state", tree(step))
        checkpoint.wait(state, 120)
    say(nm.get_latest_checkpoint().step)
    import time
    time.sleep(600)
"""


# fault (Deaths): A job of JAX on two nodes is killed, and one node has lost its memory.
# result: The next run begins on both nodes with the newest version that both can load, on a directory and on an object store.
@pytest.mark.parametrize("store", [None, "s3"])
def test_processes_on_two_nodes_begin_with_the_newest_that_both_can_load(jax, node, servers, store):
    if store:
        node.use(servers, store)
    with contextlib.ExitStack() as stack:
        for wanted in ("None None None", "1 1 True"):
            held = stack.enter_context(held_port())
            port = held.getsockname()[1]
            held.close()
            both = [jax(NODES, port, number, check=False, **node.of_rank(number)) for number in (0, 1)]
            for process in both:
                stack.callback(process.wait)
                stack.callback(process.kill)
            said = [[process.stdout.readline().strip() for _ in range(2)] for process in both]
            assert said == [[wanted, "2"]] * 2, [process.stderr.read() for process in both if process.kill() is None]
            for process in both:
                stop(process.pid)  # so that no agent writes the last version because its trainers have ended
            node.forget_memory(1)
            for process in both:
                process.kill()
                process.wait()


ENDS = """
    import time
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
    nj.init(sys.argv[1], 0, on_error="raise")
    manager = nj.Manager(sys.argv[1], save_every_steps=1_000_000)
    for step in range(1, 1_000_000):
        if manager.should_save(step):
            manager.save(step, {"state": {"w": jnp.full(2, step)}})
            break
        if step == 20:
            say("runs")
        time.sleep(0.001)
    manager.wait()
    say(step, manager.latest_step())
    manager.close()
    jax.distributed.shutdown()
"""


# fault (Deaths): One process of a JAX job gets SIGTERM, from a scheduler that takes its machine.
# result: All processes save the same step, and it is complete.
def test_a_process_of_jax_that_is_told_to_end_makes_all_processes_save_the_same_step(jax, node):
    with held_port() as held:
        port = held.getsockname()[1]
        held.close()
        both = [jax(ENDS, port, number, check=False) for number in (0, 1)]
        try:
            assert [process.stdout.readline() for process in both] == ["runs\n"] * 2, [process.communicate() for process in both if process.kill() is None]
            both[1].terminate()
            said = [process.communicate(timeout=120) for process in both]
            steps = {line for out, _ in said for line in out.split("\n") if line}
            assert len(steps) == 1 and len(set(steps.pop().split())) == 1, said
        finally:
            for process in both:
                process.kill()
                process.wait()


MISFITS = {
    "{'w': jnp.zeros((2, 3))}": "['w'] has the shape (4,), and the template (2, 3)",
    "{'w': jnp.zeros(4, jnp.int32)}": "['w'] is float32, and the template int32: cast=True converts",
    "{'v': jnp.zeros(4)}": "has no ['v']",
    "{'k': jnp.zeros(4)}": "['k'] is a PRNG key on one side alone",
    "{'t': jnp.zeros(4)}": "['t'] is a Python str",
    "{'w': 5}": "['w'] has the shape (4,), and the template a int",
    "{'f': jnp.int32(0)}": "['f'] is a Python float, and the template int32 of the shape ()",
    "{'i': jnp.int8(0)}": "['i'] is a Python int, and the template int8 of the shape ()",
    "{'d': jax.ShapeDtypeStruct((2,), np.float64)}": "['d'] would lose bits: JAX makes no array of float64 without jax_enable_x64",
}


def test_a_template_that_does_not_fit_is_refused_with_the_path(jax):
    said = jax(
        """
        nj.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("a") as checkpoint:
            nj.save(checkpoint, "state", {"w": jnp.zeros(4), "k": jax.random.key(1), "t": "text", "f": 2.5, "i": 300, "d": np.zeros(2)})
        latest = nm.get_latest_checkpoint()
        for template in sys.argv[2:]:
            try:
                nj.load(latest, "state", eval(template))
                say("loaded")
            except (nm.NebulaConfigError, nm.NebulaNotFound) as failure:
                say(failure)
        say(nj.load(latest, "state", {"f": jnp.bfloat16(0), "i": jnp.float32(0), "d": np.zeros(2)}))
        try:
            with nm.Checkpoint("b") as checkpoint:
                nj.save(checkpoint, "state", {"f": jnp.sin})
        except nm.NebulaConfigError as failure:
            say(failure)
        say(nm.get_checkpoint("b"))
        """,
        *MISFITS,
    )
    for line, why in zip(said, MISFITS.values(), strict=False):
        assert why in line
    assert said[-3].count("Array") == 2 and "['f'] is a" in said[-2] and said[-1] == "None" and len(said) == len(MISFITS) + 3


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

    import grain, time

    class Bytes:  # as Grain's older DataLoader iterator
        at = 0
        def __next__(self):
            self.at += 1
            return self.at
        def get_state(self):
            return b"at %d" % self.at
        def set_state(self, state):
            self.at = int(state[3:])

    def numbers():
        return iter(grain.MapDataset.range(1, 100).shuffle(seed=3).map(lambda x: x * 2).to_iter_dataset())

    options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=2)
    with nj.Manager(sys.argv[1], **nj.settings_of(options), keep_best=nm.Best("loss"), keep_items={"more": 1}) as manager:
        state, data, more = {"w": jnp.zeros(8), "step": 0}, numbers(), Bytes()
        restored = manager.restore({"state": state, "data": data, "more": more})
        if restored is not None:
            say("restored", restored.step, restored.metrics, restored.items["state"]["w"][0], [next(copy) for copy in [numbers()] for _ in range(16)][15] == next(data), more.at, restored.items["data"] is data)
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
        while "more.00000.iterator" in os.listdir(sys.argv[1] + "/global_step5"):  # keep_items: the agent removes it
            time.sleep(0.05)
        say("more.00000.iterator" in os.listdir(sys.argv[1] + "/global_step20"))
        for wrong in ({"nothing": state}, {"state": numbers()}, {"state": {"w": jnp.zeros(9)}}):
            try:
                manager.restore(wrong)
            except nm.NebulaError as failure:
                say(type(failure).__name__)
        policies = ocp.checkpoint_managers
        kept = policies.AnyPreservationPolicy([policies.LatestN(3), policies.EveryNSteps(100)])
        say(nj.settings_of(ocp.CheckpointManagerOptions(preservation_policy=kept, save_decision_policy=policies.FixedIntervalPolicy(7))))
        twice = policies.AnySavePolicy([policies.FixedIntervalPolicy(7), policies.FixedIntervalPolicy(9)])
        for refused in ({"save_decision_policy": twice}, {"preservation_policy": policies.BestN(get_metric_fn=len)}, {"best_fn": len}, {"todelete_subdir": "x"}, {"step_prefix": "x"}):
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
        "restored 15 {'loss': 10.0} 15.0 True 15 True", "[5, 15, 20] 20 5", "5.0", "True", "NebulaNotFound", "NebulaNotFound", "NebulaConfigError",
        "{'save_every_steps': 7, 'keep_last': 3, 'keep_every': 100}",
        "save_decision_policy", "preservation_policy", "best_fn", "todelete_subdir", "step_prefix",
    ]  # fmt: skip


def test_the_guide_names_each_option_of_orbaxs_manager(jax):
    fields = set(jax("import dataclasses, orbax.checkpoint as o; say(*(f.name for f in dataclasses.fields(o.CheckpointManagerOptions)))")[0].split())
    table = (ROOT / "docs/jax.md").read_text().partition("## Orbax's options")[2].partition("\n## ")[0]
    assert fields == {name for row in re.findall(r"^\| (`.*?) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)}


ORBAX = """
    import optax, orbax.checkpoint as ocp
    import nebulaml.integrations.orbax as nebula_orbax
    mesh = jax.make_mesh((8,), ("x",))
    split = NamedSharding(mesh, P("x"))
    params = {"w": jax.device_put(jnp.arange(16.0), split), "b": jax.device_put(jnp.ones(4, jnp.bfloat16), NamedSharding(mesh, P()))}
    tree = {"params": params, "opt": optax.adamw(1e-3).init(params), "key": jax.random.key(3), "rows": np.arange(6).reshape(2, 3), "none": None, "n": 0}
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if isinstance(leaf, jax.Array) else leaf, tree)
    root = sys.argv[1] + "/orbax"
"""


def test_a_checkpoint_of_orbax_is_read_and_what_does_not_fit_is_refused(jax):
    said = jax(ORBAX + """
    with ocp.CheckpointManager(root) as manager:
        for step in (3, 4):
            manager.save(step, args=ocp.args.StandardSave({**tree, "n": step}), metrics={"loss": 1.0})
    found = nj.load_orbax(root, abstract)
    say(same(found, {**tree, "n": 4}), found["params"]["w"].sharding == split)
    say(nj.load_orbax(root, {"n": 0}, step=3), nj.load_orbax(root + "/3", {"n": 0}), nj.load_orbax(root + "/3/default", {"n": 0}))
    other = jax.ShapeDtypeStruct((16,), jnp.float32, sharding=NamedSharding(jax.make_mesh((2, 4), ("a", "b")), P("b")))
    say(nj.load_orbax(root, {"params": {"w": other}})["params"]["w"].sharding == other.sharding)
    say(nj.load_orbax(root, {"params": {"w": jnp.zeros(16, jnp.int32)}}, cast=True)["params"]["w"].dtype)
    for wrong, which in (({"params": {"w": jnp.zeros(4)}}, {}), ({"params": {"w": jnp.zeros(16, jnp.int32)}}, {}), ({"v": jnp.zeros(1)}, {}), ({}, {"step": 9}), ({}, {"item": "x"})):
        try:
            nj.load_orbax(root, wrong, **which)
        except nm.NebulaError as failure:
            say(type(failure).__name__, str(failure).replace(root, ""))
    """)
    assert said == [
        "True True", "{'n': 3} {'n': 3} {'n': 3}", "True", "int32",
        "NebulaConfigError /4/default does not fit: params.w has the shape (16,), and the template (4,)",
        "NebulaConfigError /4/default does not fit: params.w is float32, and the template int32: cast=True converts",
        "NebulaNotFound /4/default has no v; it has 10 leaves", "NebulaNotFound there is no Orbax checkpoint in  of step 9",
        "NebulaNotFound /4 has the items default: give one of them as item=",
    ]  # fmt: skip


MANAGED_BY_ORBAX = ORBAX + """
    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda metrics: metrics["loss"], best_mode="min")
    with ocp.CheckpointManager(root, options=options, handler_registry=nebula_orbax.registry()) as manager:
        step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)
        begin = (manager.latest_step() or 0) + 1
        if begin > 1:
            found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(abstract))
            say("restored", found["n"], np.asarray(found["params"]["w"])[0], found["params"]["w"].sharding == split, manager.best_step())
            tree = found
        for number in range(begin, 8):
            tree = {**tree, "params": step(tree["params"]), "n": number}
            manager.save(number, args=ocp.args.StandardSave(tree), metrics={"loss": abs(number - 3)})
            if number == 5 and begin == 1:
                manager.wait_until_finished()
                tree = {**tree, "params": step(tree["params"]), "n": 6}
                manager.save(6, args=ocp.args.StandardSave(tree), metrics={"loss": 3})
                os.kill(os.getpid(), 9)
        manager.wait_until_finished()
        say(manager.all_steps(), manager.best_step())
    say(np.asarray(nj.load_orbax(root, abstract, step=3)["params"]["w"])[0], len(os.listdir(root + "/nebula")) <= 6)
"""


@pytest.mark.nightly("test_a_manager_of_trees_and_iterators_goes_on_after_sigkill_with_orbaxs_options")
def test_a_manager_of_orbax_writes_through_nebula_and_goes_on_after_sigkill(jax):
    killed = jax(MANAGED_BY_ORBAX, check=False)
    said, errors = killed.communicate(timeout=240)
    assert killed.returncode == -9 and said == "", errors
    restored, steps, loaded = jax(MANAGED_BY_ORBAX)
    assert restored in ("restored 4 4.0 True 3", "restored 6 6.0 True 3")  # the best two: of 3 and 4, unless the save of 6 was complete
    assert steps.endswith("] 3") and loaded == "3.0 True"


def test_a_manager_of_orbax_knows_what_an_item_has_without_a_template(jax):
    said = jax(ORBAX + """
    tree = {"params": {"w": jax.device_put(jnp.ones((8, 2), jnp.bfloat16), split), "n": np.arange(3)}, "key": jax.random.key(1), "step": 4, "none": None, "list": [{}, 2.5]}
    with ocp.CheckpointManager(root, handler_registry=nebula_orbax.registry()) as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        say(manager.item_metadata(1)["params"]["w"].shape)
    with ocp.CheckpointManager(root, handler_registry=nebula_orbax.registry("default")) as manager:  # another one, that has saved nothing
        found = manager.item_metadata(1)
        w, n = found["params"]["w"], found["params"]["n"]
        say(type(found).__name__, w.shape, w.dtype, w.name, n.shape, n.dtype, found["key"].shape, found["key"].dtype, found["step"].dtype)
        say(found["none"], found["list"][0], found["list"][1].dtype)
        abstract = jax.tree.map(lambda about: jax.ShapeDtypeStruct(about.shape, about.dtype, sharding=split if about.shape else None), {"w": w})
        say(manager.restore(1, args=ocp.args.StandardRestore({"params": abstract}))["params"]["w"].sharding == split)
        say(manager.restore(1, args=ocp.args.StandardRestore())["list"])
    """)
    assert said == ["(8, 2)", "_TreeMetadataImpl (8, 2) bfloat16 params.w (3,) int64 () key<fry> int64", "None {} float64", "True", "[{}, 2.5]"]


def test_a_damaged_item_of_orbax_is_an_error_and_never_another_step(jax):
    said = jax(ORBAX + """
    import json, pathlib
    with ocp.CheckpointManager(root, handler_registry=nebula_orbax.registry()) as manager:
        for number in (1, 2):
            manager.save(number, args=ocp.args.StandardSave({"n": number}))
            manager.wait_until_finished()
    pointer = pathlib.Path(root) / "1/default/nebula.json"
    sound = pointer.read_text()
    say(nj.load_orbax(root, {"n": 0}, step=1))
    other = json.loads((pathlib.Path(root) / "2/default/nebula.json").read_text())
    for wrong in (sound.replace("1/default", "2/default"), sound.replace(str(json.loads(sound)["sequence"]), str(other["sequence"])), sound[:-9], "[]", "{}"):
        pointer.write_text(wrong)
        try:
            say(nj.load_orbax(root, {"n": 0}, step=1))
        except nm.NebulaError as failure:
            say(type(failure).__name__, str(pointer) in str(failure))
    """)
    assert said == ["{'n': 1}", *["NebulaCorrupt True"] * 5]


def test_a_version_whose_item_orbax_is_about_to_name_stays(jax):
    said = jax("""
        import pathlib
        import nebulaml.integrations.orbax as nebula_orbax
        root, tree = pathlib.Path(sys.argv[1]), {"w": jnp.ones(1)}
        handler, unfinished = nebula_orbax.Handler(), root / "x" / ("two" + nebula_orbax._UNFINISHED)
        for item in ("one", unfinished.name, "three"):
            (root / "x" / item).mkdir(parents=True)
            handler.save(root / "x" / item, tree)
        tags = lambda: sorted(row.tag for row in handler._session(root / "nebula").checkpoints())
        say(*tags())

        (root / "x").rename(root / ("x" + nebula_orbax._UNFINISHED))

        def listdir(folder, real=os.listdir):
            found = real(folder)
            for each in (root / name for name in found if name == "x" + nebula_orbax._UNFINISHED):
                each.rename(root / "x")
            return found
        nebula_orbax.os.listdir = listdir
        say(nebula_orbax._has_item(root, "x", "one"), nebula_orbax._has_item(root, "x", "four"))
        handler.close()
    """)
    assert said == ["x/one x/three x/two", "True False"]


# fault (Storage): The directory of an Orbax step cannot be read, or is a link to a disk that is not mounted.
# result: Its version stays.
def test_a_version_whose_step_cannot_be_read_stays(jax):
    said = jax("""
        import logging, pathlib
        import nebulaml.integrations.orbax as nebula_orbax
        root, tree = pathlib.Path(sys.argv[1]), {"w": jnp.ones(1)}
        handler = nebula_orbax.Handler()
        logging.getLogger("nebulaml").addHandler(type("Says", (logging.Handler,), {"emit": lambda self, record: say(record.getMessage())})())

        def save(step):
            (root / step / "default").mkdir(parents=True)
            handler.save(root / step / "default", tree)
        tags = lambda: sorted(row.tag for row in handler._session(root / "nebula").checkpoints())
        for step in ("1", "2", "3"):
            save(step)
        with nm.Checkpoint("own", session=handler._session(root / "nebula")) as own:
            own.save_bytes("a", [b"mine"])
        own.wait("durable", 60)

        (root / "1").rename(root.parent / "moved")
        (root / "1").symlink_to(root.parent / "moved")
        (root.parent / "moved").rename(root.parent / "unmounted")

        def listdir(folder, real=os.listdir):
            if folder == str(root / "2"):
                raise OSError(5, "Input/output error", folder)
            return real(folder)
        nebula_orbax.os.listdir = listdir
        import shutil
        shutil.rmtree(root / "3")
        save("4")
        say(*tags())
        handler.close()
    """)
    assert sorted(line.partition(" stays in ")[0] for line in said[:-1]) == ["nebula: 1/default", "nebula: 2/default"], said
    assert said[-1] == "1/default 2/default 4/default own"


ORBAXS_OWN = """
    import tempfile
    from absl.testing import absltest
    import orbax.checkpoint as ocp
    from orbax.checkpoint._src.checkpointers import checkpointer_test_utils
    import nebulaml.integrations.orbax as nebula_orbax

    class Checkpointers(checkpointer_test_utils.CheckpointerTestBase.Test):
        def checkpointer(self, handler, **kwargs):
            if isinstance(handler, ocp.PyTreeCheckpointHandler):
                handler = nebula_orbax.Handler()
            elif isinstance(handler, ocp.CompositeCheckpointHandler):
                handler = ocp.CompositeCheckpointHandler(handler_registry=nebula_orbax.registry())
            return ocp.AsyncCheckpointer(handler, **kwargs)

    sys.argv = ["tests", f"--test_tmpdir={sys.argv[1]}"]
    absltest.main()
"""
# These tests ask for parts of Orbax itself: its metadata of arrays, its limits of memory, its empty nodes, its refusal of parts without a template.
ORBAX_ALONE = {
    "test_composite_handler_metadata", "test_memory_limiting0", "test_memory_limiting1", "test_partial_restore_with_placeholder",
    "test_save_restore_named_tuple_full", "test_save_with_failing_array_metadata_store_in_finalize",
}  # fmt: skip


@full
def test_orbaxs_own_tests_of_checkpointers_pass_with_nebulas_handler_but_for_those_of_its_files(jax):
    running = jax(ORBAXS_OWN, check=False)
    _, said = running.communicate(timeout=240)
    assert {line.split()[1] for line in said.split("\n") if re.match("(ERROR|FAIL): ", line)} == ORBAX_ALONE, said[-3000:]
    assert "Ran 24 tests" in said


def test_a_tree_without_a_template_is_dicts_and_lists(jax):
    said = jax("""
        import collections, optax
        Pair = collections.namedtuple("Pair", "a b")
        nj.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("a") as checkpoint:
            nj.save(checkpoint, "state", {"pair": Pair(jnp.ones(1), np.zeros(2)), "list": [5, (), "x"], "by": {1: None}, "deep": {"er": jax.random.key(1)},
                                          "none": {"a": {}, "b": [], "c": [[], {}, optax.EmptyState(), None, optax.MaskedNode()], "d": collections.OrderedDict()}})
            nj.save(checkpoint, "leaf", jnp.ones(3))
            nj.save(checkpoint, "empty", {})
            nj.save(checkpoint, "nothing", [])
            for tree in ([1, {}], [1, []], [1, (), 2], [1, None], [1, {"a": ()}]):  # another one each time
                nj.save(checkpoint, "last", tree)
        latest = nm.get_latest_checkpoint()
        found = nj.load(latest, "state")
        say(sorted(found), type(found["pair"]["a"]).__name__, type(found["pair"]["b"]).__name__, found["list"], found["by"], found["deep"]["er"].dtype)
        say(nj.load(latest, "leaf").shape, nj.load(latest, "empty"), nj.load(latest, "nothing"), nj.load(latest, "last"), sorted(found["none"].items()))
        state = optax.adam(0.1).init({"w": jnp.ones(2), "none": {}})
        with nm.Checkpoint("b") as checkpoint:
            nj.save(checkpoint, "state", state)
        found = nj.load(nm.get_latest_checkpoint(), "state", state)
        say(same(found, state), nj.load(nm.get_latest_checkpoint(), "state")[1], nj.load(nm.get_latest_checkpoint(), "state")[0]["mu"]["none"])
    """)
    assert said == [
        "['by', 'deep', 'list', 'none', 'pair'] ArrayImpl ndarray [5, [], 'x'] {1: None} key<fry>",
        "(3,) {} [] [1, {'a': []}] [('a', {}), ('b', []), ('c', [[], {}, {}, None, {}]), ('d', {})]", "True {} {}",
    ]  # fmt: skip


def test_numpy_values_that_no_load_would_give_back_are_refused_by_the_save(jax):
    said = jax("""
        nj.init(sys.argv[1], 0, on_error="raise")
        parts = np.dtype([("a", "i4"), ("b", "f8")])
        leaves = [np.zeros(2, parts), np.zeros(2, parts)[0], np.zeros(2, parts).view(np.recarray), np.ma.array([1, 2], mask=[0, 1]), np.array([None])]
        for leaf in (*leaves, np.arange(3, dtype=">i4"), np.array(["a", "bc"]), np.datetime64("2020-01-01"), np.zeros(2, "m8[s]"), np.bool_(1)):
            try:
                with nm.Checkpoint("a") as checkpoint:
                    nj.save(checkpoint, "state", leaf)
                found = nj.load(nm.get_checkpoint("a"), "state")
                say(found.dtype == leaf.dtype and found.tobytes() == leaf.tobytes())
            except nm.NebulaConfigError as failure:
                say("cannot be saved: the tree is a numpy" in str(failure) and f" of {leaf.dtype}" in str(failure))
            nm.flush_persistence()
    """)
    assert said == ["True"] * 10


def test_keys_of_dicts_that_are_equal_and_have_other_texts_stay_apart(jax):
    said = jax("""
        nj.init(sys.argv[1], 0, on_error="raise")
        with nm.Checkpoint("a") as checkpoint:
            nj.save(checkpoint, "first", [{(1, 2): 3}, {0.0: 4}])
            nj.save(checkpoint, "second", [{(True, 2.0): 3}, {-0.0: 4}])
        say(*nj.loading.Saved(nm.get_latest_checkpoint(), "second").leaves)
    """)
    assert "(True, 2.0)" in said[0] and "-0.0" in said[0]


def test_without_a_template_numbers_of_64_bits_are_refused_unless_jax_has_them(jax):
    said = jax("""
        nj.init(sys.argv[1], 0, on_error="raise")
        jax.config.update("jax_enable_x64", True)
        with nm.Checkpoint("a") as checkpoint:
            nj.save(checkpoint, "state", {"i": jnp.int64(1 << 40), "n": np.array(1 << 40)})
        latest = nm.get_latest_checkpoint()
        say(nj.load(latest, "state"))
        jax.config.update("jax_enable_x64", False)
        for template in (None, {"i": 0}, {"n": 0}):
            try:
                say(nj.load(latest, "state", template))
            except nm.NebulaConfigError as failure:
                say(failure)
    """)
    assert said[0] == "{'i': Array(1099511627776, dtype=int64), 'n': array(1099511627776)}" and said[3] == "{'n': array(1099511627776)}"
    assert all("without jax_enable_x64: ['i']" in line for line in said[1:3])
