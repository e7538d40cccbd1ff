"""Hugging Face directories of checkpoints: names and values, kills at each step, full disks, refusals. tests/frameworks has transformers."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from nebulaml._session import locate
from nebulaml.errors import NebulaConfigError, NebulaError, NebulaNotFound
from nebulaml.export import directory, export_hf, size_of

safetensors = pytest.importorskip("safetensors.torch")

NIGHTLY = bool(os.environ.get("NEBULA_TEST_NIGHTLY"))  # kills at each step, not at each thirty-second of one of the two kinds


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Returns what a reader of Hugging Face finds, by the index if there is one."""
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return safetensors.load_file(path / "model.safetensors")
    names = json.loads(index.read_text())["weight_map"]
    found = {file: safetensors.load_file(path / file) for file in set(names.values())}
    assert sum(map(len, found.values())) == len(names)
    return {name: found[file][name] for name, file in names.items()}


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[name].dtype == wanted[name].dtype and torch.equal(found[name], wanted[name]) for name in wanted
    )


def left_in(folder: Path) -> list[str]:
    return sorted(one for one in os.listdir(folder) if one.startswith(".nebula-export-"))


def state_of(layers: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    state = {f"layers.{i}.weight": torch.randn(8, 16) for i in range(layers)}
    state["turned"] = torch.arange(12.0).reshape(3, 4).t()
    state["count"] = torch.tensor(5)
    state["mask"] = torch.tensor([True, False])
    state["embed.weight"] = torch.randn(10, 4)
    state["head.weight"] = state["embed.weight"]
    return state


def without(state: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in state.items() if name not in names}


def test_a_directory_has_the_names_of_the_model_and_each_tied_tensor_once(nm, tmp_path):
    state = state_of()
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", {"model": {f"module._orig_mod.{name}": value for name, value in state.items()}, "step": 1})
        checkpoint.save("optim.pt", {"lr": 1.0})
    config = {"model_type": "mine", "torch_dtype": "float32"}
    done = nm.export_hf("global_step1", tmp_path / "out", config=config)
    assert equal(weights(tmp_path / "out"), without(state, "head.weight"))
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert done.files == ("model.safetensors",) and done.tensors == 7


def test_floats_are_cast_and_divided_into_files_of_the_size_that_was_asked_for(nm, tmp_path):
    state = state_of()
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", state)
    nm.export_hf(checkpoint, tmp_path / "out", dtype="bf16", max_shard_size=300, config={"a": 1})
    cast = {name: value.to(torch.bfloat16) if value.is_floating_point() else value for name, value in without(state, "head.weight").items()}
    assert equal(weights(tmp_path / "out"), cast)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert [one.name for one in files] == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2 and all(one.stat().st_size - 8 - struct.unpack("<Q", one.read_bytes()[:8])[0] <= 300 for one in files)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.numel() * value.element_size() for value in cast.values())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.nightly("test_a_cast_rounds_to_nearest_even_once"))])
def test_a_cast_rounds_to_nearest_even_once(kind):
    torch.manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), dtype=torch.int64).to(torch.int32)
    found = directory.cast(bits.view(torch.float32), kind)
    assert torch.equal(found.view(torch.int16), bits.view(torch.float32).to(kind).view(torch.int16))
    values = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16).view(kind)
    values = values[torch.isfinite(values)].double().unique()
    middle = (values[1:] + values[:-1]) / 2
    wide = torch.cat([middle, torch.nextafter(middle, torch.tensor(9e99).double()), torch.nextafter(middle, torch.tensor(-9e99).double()), values])
    low, high = values[torch.searchsorted(values, wide, right=True).clamp(1, len(values)) - 1], values[torch.searchsorted(values, wide).clamp(0, len(values) - 1)]
    cast = directory.cast(wide, kind)
    to_low, to_high = wide - low, high - wide
    is_even = lambda one: (one.to(kind).view(torch.int16) & 1) == 0  # noqa: E731
    wanted = torch.where((to_low < to_high) | ((to_low == to_high) & is_even(low)), low, high)
    assert torch.equal(cast.double(), wanted)


LARGE = 1 << 26  # floats of each of two tensors: 512 MiB together


@pytest.mark.nightly
def test_a_checkpoint_in_storage_is_exported_with_memory_for_a_slice(place, tmp_path):
    """What the export adds to the process is far less than the weights."""
    place.run(
        """
        nm.init(sys.argv[1], 0)
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("model.pt", {"a": torch.ones(int(sys.argv[2])), "b": torch.arange(int(sys.argv[2])).float()})
        checkpoint.wait("durable", 120)
        """,
        place.storage,
        LARGE,
    )
    place.lose_memory()
    output = place.run(
        """
        from nebulaml import export
        from nebulaml.export import command, dcp, deepspeed, directory, naming, sources  # not part of the measure
        def peak(): return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) >> 10
        torch.set_num_threads(2)
        with nm.Reader(sys.argv[1]) as reader:
            found = reader.latest()
            before = peak()
            done = nm.export_hf(found, sys.argv[2], dtype="bf16", max_shard_size=3 * int(sys.argv[3]))
            say(peak() - before, len(done.files))
        """,
        place.storage,
        tmp_path / "out",
        LARGE,
    )
    grown, files = map(int, output.split())
    assert grown < 300 and files == 2
    assert torch.equal(weights(tmp_path / "out")["b"], torch.arange(LARGE).float().to(torch.bfloat16))


# Counts the calls that touch the file system, and dies at one of them.
DYING = """
    import shutil
    from nebulaml import _nebula
    left = int(sys.argv[3])
    def step():
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    def counted(call):
        def run(*arguments, **options):
            step()
            result = call(*arguments, **options)
            return result
        return run
    class Output:
        def __init__(self, *arguments):
            step()
            self._output = plain(*arguments)
        def __getattr__(self, name):
            return counted(getattr(self._output, name))
    plain, _nebula.Output = _nebula.Output, Output
    for name in ("staging_make", "staging_place", "staging_end", "read_sums"):
        setattr(_nebula, name, counted(getattr(_nebula, name)))
    shutil.rmtree = counted(shutil.rmtree)
    nm.export_hf(sys.argv[1], sys.argv[2], config={"new": True}, max_shard_size=900, replace=sys.argv[4] == "replace")
    say("done")
"""


# fault: as test_an_export_that_is_killed_on_its_way_has_no_config_and_the_next_one_takes_its_place
@pytest.mark.parametrize("how", [pytest.param("new", marks=pytest.mark.nightly), "replace"])
def test_a_kill_at_any_step_leaves_no_directory_or_a_whole_one(place, tmp_path, how):
    state = state_of(2)
    torch.save(state, tmp_path / "model.pt")
    old = {"old": torch.ones(3)}
    (tmp_path / "parent").mkdir()
    out = tmp_path / "parent" / "out"
    for at in range(1, 100) if NIGHTLY else range(17, 100, 32):
        if how == "replace" and not out.exists():
            torch.save(old, tmp_path / "old.pt")
            export_hf(str(tmp_path / "old.pt"), out, config={"new": False})
        trainer = place.trainer(DYING, tmp_path / "model.pt", out, at, how)
        said, code = trainer.communicate(timeout=120)[0], trainer.wait(60)
        assert code == (0 if said == "done\n" else -signal.SIGKILL)
        if out.exists():
            is_new = json.loads((out / "config.json").read_text())["new"]
            assert equal(weights(out), without(state, "head.weight") if is_new else old)
        if code == 0:
            break
        if out.exists() and is_new:
            subprocess.run(["rm", "-r", out], check=True)
    assert code == 0 and at > 15, "the number of steps"
    assert left_in(tmp_path / "parent") == [] and is_new


# fault: as test_an_export_that_is_killed_on_its_way_has_no_config_and_the_next_one_takes_its_place
def test_the_leftovers_of_a_killed_export_go_and_those_of_a_running_one_stay(place, tmp_path):
    torch.save(state_of(), tmp_path / "model.pt")
    (tmp_path / "parent").mkdir()
    running = place.trainer(
        """
        from nebulaml import _nebula
        place = _nebula.staging_make(sys.argv[1])
        say(place[0])
        sys.stdin.readline()
        """,
        tmp_path / "parent", stdin=True,
    )  # fmt: skip
    kept = running.stdout.readline().strip()
    (tmp_path / "parent" / ".nebula-export-0123456789abcdef").mkdir()
    (tmp_path / "parent" / ".nebula-export-0123456789abcdef" / "model.safetensors").write_bytes(b"half")
    (tmp_path / "parent" / ".nebula-export-0123456789abcdef.lock").touch()
    export_hf(str(tmp_path / "model.pt"), tmp_path / "parent" / "out")
    assert left_in(tmp_path / "parent") == [os.path.basename(kept), os.path.basename(kept) + ".lock"]
    running.stdin.close()
    assert running.wait(60) == 0
    running.stdout.close()
    export_hf(str(tmp_path / "model.pt"), tmp_path / "parent" / "second")
    assert left_in(tmp_path / "parent") == []


# fault (Arguments of the caller): A Hugging Face directory is asked for and cannot be made: a file cannot be written,
# a rank's file is missing, the mapping of tensor-parallel ranks is wrong, the dtype is unknown.
# result: One sentence names the cause, and no directory appears.
@pytest.mark.nightly("test_a_kill_at_any_step_leaves_no_directory_or_a_whole_one")
def test_a_file_that_cannot_be_written_fails_the_export_in_one_sentence_and_leaves_nothing(place, tmp_path):
    torch.save(state_of(), tmp_path / "model.pt")
    said = place.run(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, 700))
        try:
            nm.export_hf(sys.argv[1], sys.argv[2])
        except nm.NebulaError as failure:
            say(failure.status, failure)
        """,
        tmp_path / "model.pt",
        tmp_path / "parent" / "out",
    )
    assert said.startswith("no-space cannot write ") and "File too large" in said and len(said.splitlines()) == 1
    assert os.listdir(tmp_path / "parent") == []


def test_a_parent_that_cannot_be_made_and_a_file_that_cannot_be_read_are_one_sentence(tmp_path):
    torch.save(state_of(), tmp_path / "model.pt")
    with pytest.raises(NebulaError, match=r"cannot make the directory .*model.pt/parent"):
        export_hf(str(tmp_path / "model.pt"), tmp_path / "model.pt" / "parent" / "out")
    (tmp_path / "hf").mkdir()
    torch.save(state_of(), tmp_path / "hf" / "pytorch_model.bin")
    (tmp_path / "hf" / "config.json").symlink_to("nowhere")
    (tmp_path / "hf" / "tokenizer.json").mkdir()
    with pytest.raises(NebulaNotFound, match=r"config.json cannot be read there"):
        export_hf(tmp_path / "hf", tmp_path / "out", config=tmp_path / "hf")
    assert not (tmp_path / "out").exists()


def test_an_existing_directory_is_refused_unless_it_is_replaced_or_empty(tmp_path):
    torch.save(state_of(), tmp_path / "model.pt")
    out = tmp_path / "out"
    out.mkdir()
    export_hf(str(tmp_path / "model.pt"), out)
    (out / "mine.txt").write_text("mine")
    with pytest.raises(NebulaConfigError, match="exists already"):
        export_hf(str(tmp_path / "model.pt"), out)
    assert (out / "mine.txt").exists()
    export_hf(str(tmp_path / "model.pt"), out, replace=True, dtype="fp16")
    assert os.listdir(out) == ["model.safetensors"] and weights(out)["turned"].dtype == torch.float16
    (tmp_path / "file").write_text("")
    with pytest.raises(NebulaConfigError, match="exists already"):
        export_hf(str(tmp_path / "model.pt"), tmp_path / "file", replace=True)


# fault: as test_a_file_that_cannot_be_written_fails_the_export_in_one_sentence_and_leaves_nothing
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int4"}, "dtype='int4': give one of bf16, fp16 and fp32"),
        ({"max_shard_size": "big"}, "max_shard_size='big'"),
        ({"name": "none.pt"}, "has no file 'none.pt'; it has: model.pt"),
        ({"key": "ema"}, "model.pt has no flat dict of tensors under 'ema'"),
        ({"config": "/nowhere"}, "config.json cannot be read there"),
        ({"config": 5}, "give a directory that has config.json"),
        ({"rename": lambda name: "one"}, "would be named 'one', as another tensor"),
        ({"rename": lambda name: None}, "no tensor is left"),
        ({"ranks": "*.pt"}, "needs both"),
    ],
)
def test_a_wrong_argument_is_one_sentence_and_nothing_is_written(tmp_path, options, message):
    (tmp_path / "from").mkdir()
    torch.save(state_of(), tmp_path / "from" / "model.pt")
    with pytest.raises(NebulaError, match=message) as failure:
        export_hf(tmp_path / "from", tmp_path / "parent" / "out", **options)
    assert "\n" not in str(failure.value)
    assert not (tmp_path / "parent").exists() or os.listdir(tmp_path / "parent") == []


def test_a_version_that_is_not_complete_is_refused_also_by_its_directory(nm, place, tmp_path):
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", state_of())
    checkpoint.wait("durable", 60)
    export_hf(place.storage / "global_step1", tmp_path / "whole")
    place.lose_memory()
    (place.storage / "global_step1" / ".nebula" / "manifest-1.json").unlink()
    with pytest.raises(NebulaNotFound, match="there is no complete checkpoint 'global_step1'"):
        export_hf(place.storage / "global_step1", tmp_path / "half")
    assert weights(tmp_path / "whole") and not (tmp_path / "half").exists()


def test_sizes_are_those_of_hugging_face():
    assert [size_of(one) for one in ("5GB", "500MiB", 7, "2kb", "1 TiB")] == [5 * 10**9, 500 << 20, 7, 2000, 1 << 40]


def test_names_are_changed_by_a_dict_or_a_function_and_none_leaves_a_tensor_out(tmp_path):
    torch.save(state_of(), tmp_path / "model.pt")
    export_hf(str(tmp_path / "model.pt"), tmp_path / "a", rename={"turned": "straight", "mask": None})
    assert {"straight", "count"} < weights(tmp_path / "a").keys() and not {"mask", "turned"} & weights(tmp_path / "a").keys()
    export_hf(str(tmp_path / "model.pt"), tmp_path / "b", rename=lambda name: f"x.{name}")
    assert all(name.startswith("x.") for name in weights(tmp_path / "b"))


def test_the_configuration_and_the_tokenizer_come_along_and_training_files_do_not(tmp_path):
    source = tmp_path / "trained"
    source.mkdir()
    torch.save(state_of(), source / "pytorch_model.bin")
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja"):
        (source / name).write_text("{}")
    for name in ("optimizer.pt", "trainer_state.json", "training_args.bin", "model.safetensors.index.json.bak"):
        (source / name).write_text("no")
    (source / "config.json").write_text(json.dumps({"model_type": "mine", "dtype": "float32"}))
    export_hf(source, tmp_path / "out", dtype="fp16")
    copied = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja"}
    assert set(os.listdir(tmp_path / "out")) == copied | {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "mine", "dtype": "float16"}


def test_a_file_with_classes_of_the_program_is_exported_and_none_of_its_code_runs(place, tmp_path):
    place.run(
        """
        class Args:
            def __reduce__(self):
                return (os.system, ("touch " + sys.argv[2] + ".ran",))
        nm.init(sys.argv[1], 0)
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("model.pt", {"state_dict": {"net.w": torch.arange(5.0), "net.b": torch.ones(2)}, "args": Args(), "pytorch-lightning_version": "2"})
        nm.export_hf(checkpoint, sys.argv[2])
        """,
        place.storage,
        tmp_path / "x",
    )
    assert equal(weights(tmp_path / "x"), {"w": torch.arange(5.0), "b": torch.ones(2)})  # Lightning's module around the model has no name here
    assert not (tmp_path / "x.ran").exists()


MAPPING = {"*.column": 0, "*.row": 1, "norm": "replicate", "*.qkv": lambda parts: torch.cat([torch.cat([part[i] for part in parts]) for i in range(3)])}


def ranks_of(folder: Path) -> dict[str, torch.Tensor]:
    """Writes the files of two tensor-parallel ranks. Returns the whole tensors."""
    torch.manual_seed(2)
    whole = {"a.column": torch.randn(6, 4), "a.row": torch.randn(4, 6), "norm": torch.randn(4), "a.qkv": torch.randn(12, 4)}
    folder.mkdir()
    q, k, v = whole["a.qkv"].chunk(3)
    for rank in range(2):
        part = {
            "a.column": whole["a.column"].chunk(2)[rank], "a.row": whole["a.row"].chunk(2, 1)[rank], "norm": whole["norm"],
            "a.qkv": torch.stack([one.chunk(2)[rank] for one in (q, k, v)]),
        }  # fmt: skip
        torch.save({name: value.clone() for name, value in part.items()}, folder / f"rank{rank}.pt")
    return whole


def test_tensor_parallel_ranks_are_put_together_by_the_mapping(tmp_path, monkeypatch):
    whole = ranks_of(tmp_path / "ranks")
    monkeypatch.setattr(directory, "SLICE_BYTES", 16)  # one row at a time
    export_hf(tmp_path / "ranks", tmp_path / "out", ranks="rank*.pt", mapping=MAPPING)
    assert equal(weights(tmp_path / "out"), whole)
    export_hf(tmp_path / "ranks", tmp_path / "out2", ranks=["rank0.pt", "rank1.pt"], mapping=MAPPING)
    assert equal(weights(tmp_path / "out2"), whole)


# fault: as test_a_file_that_cannot_be_written_fails_the_export_in_one_sentence_and_leaves_nothing
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"*.qkv": None}, "the mapping has no pattern for a.qkv"),
        ({"a.column": "replicate"}, "a.column is replicated, and rank 1 has other values"),
        ({"norm": 5}, "norm along dimension 5, and they have the shapes"),
        ({"norm": "half"}, "gives norm 'half'"),
    ],
)
def test_a_mapping_that_does_not_fit_is_one_sentence_and_nothing_is_written(tmp_path, change, message):
    ranks_of(tmp_path / "ranks")
    mapping = {pattern: rule for pattern, rule in {**change, **{name: MAPPING[name] for name in MAPPING if name not in change}}.items() if rule is not None}
    with pytest.raises(NebulaConfigError, match=message):
        export_hf(tmp_path / "ranks", tmp_path / "parent" / "out", ranks="rank*.pt", mapping=mapping)
    assert not (tmp_path / "parent").exists() or os.listdir(tmp_path / "parent") == []


# fault: as test_a_file_that_cannot_be_written_fails_the_export_in_one_sentence_and_leaves_nothing
def test_ranks_that_lack_a_name_or_a_file_are_refused(tmp_path):
    ranks_of(tmp_path / "ranks")
    state = torch.load(tmp_path / "ranks" / "rank1.pt", weights_only=True)
    del state["norm"]
    torch.save(state, tmp_path / "ranks" / "rank1.pt")
    with pytest.raises(NebulaConfigError, match=r"rank1.pt and rank0.pt do not have the same names: norm"):
        export_hf(tmp_path / "ranks", tmp_path / "out", ranks="rank*.pt", mapping=MAPPING)
    with pytest.raises(NebulaNotFound, match=r"has no file 'rank2.pt'; it has: rank0.pt, rank1.pt"):
        export_hf(tmp_path / "ranks", tmp_path / "out", ranks=["rank0.pt", "rank2.pt"], mapping=MAPPING)
    (tmp_path / "half").mkdir()
    safetensors.save_file({"a": torch.ones(2)}, tmp_path / "half" / "model-00001-of-00002.safetensors")
    with pytest.raises(NebulaNotFound, match="has 1 of the 2 files of its weights"):
        export_hf(tmp_path / "half", tmp_path / "out")


@pytest.fixture
def restore(nm, place) -> Callable[..., subprocess.CompletedProcess]:
    """Runs `nebula restore` of a version whose model.pt has state_of()."""
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("model.pt", state_of())
    checkpoint.wait("durable", 60)

    def run(*words: object) -> subprocess.CompletedProcess:
        command = [locate.agent_path(), "restore", *map(str, words), "--path", str(place.storage)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


def test_the_command_exports(restore, tmp_path):
    done = restore("latest", "--hf", tmp_path / "out", "--dtype", "bf16", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["tag"] == "global_step1" and said["files"] == [{"name": "model.safetensors"}]
    assert torch.equal(weights(tmp_path / "out")["turned"], state_of()["turned"].to(torch.bfloat16))


@pytest.mark.nightly
def test_the_exit_codes_of_an_export_are_those_of_restore(restore, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    for code, words in ((5, ["latest", "--hf", tmp_path / "out"]), (3, ["none", "--hf", tmp_path / "b"]), (2, ["latest", "--hf", tmp_path / "b", "--dtype", "x"])):
        done = restore(*words)
        assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (code, 1, "")
    assert restore("global_step1", f"--hf={tmp_path / 'out'}", "--force").returncode == 0
    assert equal(weights(tmp_path / "out"), without(state_of(), "head.weight"))


def zero_of(folder: Path, stage: int) -> dict[str, torch.Tensor]:
    """Writes a checkpoint of two ranks in the form of DeepSpeed's ZeRO. Returns the weights."""
    torch.manual_seed(3)
    whole = {"a": torch.randn(5, 3), "b": torch.randn(7), "c": torch.randn(2, 2)}
    buffers = {"count": torch.tensor(9)}
    folder.mkdir()
    model = {"module": {**whole, **buffers}, "param_shapes": [{name: value.shape for name, value in whole.items()}], "buffer_names": ["count"]}
    if stage == 3:
        model["module"] = {**{name: torch.empty(0) for name in whole}, **buffers}
        parts = [[], []]
        for value in whole.values():
            size = -(-value.numel() // 2)
            flat = torch.cat([value.reshape(-1), torch.full((1,), 99.0)])
            for rank in range(2):
                parts[rank].append(flat[rank * size : (rank + 1) * size])
        flats = [torch.cat(part) for part in parts]
        key, count = "fp32_flat_groups", 2
    else:
        flats = list(torch.cat([torch.cat([value.reshape(-1), torch.full((1,), 99.0)]) for value in whole.values()]).chunk(2))  # a gap after each
        key, count = "single_partition_of_fp32_groups", [2]
    for rank, flat in enumerate(flats):
        state = {"zero_stage": stage, key: [flat], "partition_count": count, "param_alignment_paddings": [[1, 1, 1]]}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(model, folder / name)
    return {**whole, **buffers}


# fault: as test_a_file_that_cannot_be_written_fails_the_export_in_one_sentence_and_leaves_nothing
@pytest.mark.parametrize("stage", [2, 3])
def test_partitions_of_zero_are_put_together_and_a_missing_one_is_refused(tmp_path, stage):
    whole = zero_of(tmp_path / "zero", stage)
    export_hf(tmp_path / "zero", tmp_path / "out")
    assert equal(weights(tmp_path / "out"), whole)
    path = tmp_path / "zero" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    state = torch.load(path, weights_only=True)["optimizer_state_dict"]
    short = {name: [value[0][:-4]] if name.endswith("groups") else value for name, value in state.items()}
    torch.save({"optimizer_state_dict": short}, path)
    with pytest.raises(NebulaError, match="the partitions"):
        export_hf(tmp_path / "zero", tmp_path / "out2")
    path.unlink()
    with pytest.raises(NebulaNotFound, match="no partition of rank 1, of 2 ranks"):
        export_hf(tmp_path / "zero", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("asks", [{}, {"ranks": "mp_rank_*_model_states.pt", "mapping": MAPPING}])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "experts of DeepSpeed-MoE in files of their own"),
        ("expp_rank_1_mp_rank_00_optim_states.pt", "experts of DeepSpeed-MoE in files of their own"),
        ("layer_03-model_00-model_states.pt", "layers of a pipeline in files of their own"),
    ],
)
def test_weights_in_files_beside_those_of_deepspeeds_ranks_are_refused_and_nothing_is_written(tmp_path, name, message, asks):
    ranks_of(tmp_path / "ranks")
    (tmp_path / "ranks" / "rank0.pt").rename(tmp_path / "ranks" / "mp_rank_00_model_states.pt")
    (tmp_path / "ranks" / "rank1.pt").rename(tmp_path / "ranks" / name)
    with pytest.raises(NebulaConfigError, match=message):
        export_hf(tmp_path / "ranks", tmp_path / "parent" / "out", **asks)
    assert not (tmp_path / "parent").exists()


def test_tensor_parallel_ranks_of_deepspeed_need_a_mapping_and_those_of_stage_3_are_refused(tmp_path):
    whole, folder = ranks_of(tmp_path / "ranks"), tmp_path / "ranks"
    for rank in range(2):
        module = torch.load(folder / f"rank{rank}.pt", weights_only=True)
        (folder / f"rank{rank}.pt").unlink()
        torch.save({"module": module, "mp_world_size": 2}, folder / f"mp_rank_0{rank}_model_states.pt")
    with pytest.raises(NebulaConfigError, match=r"mp_rank_00, 01\): give ranks="):
        export_hf(folder, tmp_path / "none")
    export_hf(folder, tmp_path / "out", ranks="mp_rank_*_model_states.pt", mapping=MAPPING)
    assert equal(weights(tmp_path / "out"), whole)
    for rank in range(2):
        (folder / f"mp_rank_0{rank}_model_states.pt").rename(folder / f"zero_pp_rank_0_mp_rank_0{rank}_model_states.pt")
    with pytest.raises(NebulaConfigError, match="placeholders for weights"):
        export_hf(folder, tmp_path / "none", ranks="zero_pp_rank_0_*_model_states.pt", mapping=MAPPING)
    assert not (tmp_path / "none").exists()


# fault: as test_a_file_that_cannot_be_written_fails_the_export_in_one_sentence_and_leaves_nothing
def test_a_directory_of_torchs_own_writer_is_exported_and_a_missing_file_is_refused(tmp_path):
    import torch.distributed.checkpoint as dcp

    state = without(state_of(), "head.weight", "turned")
    dcp.save({"model": state, "optim": {"exp": torch.ones(3)}, "step": 4}, checkpoint_id=tmp_path / "dcp")
    export_hf(tmp_path / "dcp", tmp_path / "out", dtype="fp32")
    assert equal(weights(tmp_path / "out"), state)
    dcp.save({**state, "optimizer": {"layers.0.exp": torch.ones(3)}}, checkpoint_id=tmp_path / "flat")  # as torchtitan
    export_hf(tmp_path / "flat", tmp_path / "flat-out")
    assert equal(weights(tmp_path / "flat-out"), state)
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    with pytest.raises(NebulaNotFound, match=r"has no file '__0_0.distcp', in which a rank has saved its part of "):
        export_hf(tmp_path / "dcp", tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


@pytest.mark.nightly("test_the_command_exports", "test_tensor_parallel_ranks_are_put_together_by_the_mapping")
def test_the_command_takes_mappings_and_names_from_files(tmp_path):
    whole = ranks_of(tmp_path / "ranks")
    for name in ("rank0.pt", "rank1.pt"):
        state = torch.load(tmp_path / "ranks" / name, weights_only=True)
        del state["a.qkv"]  # takes a function
        torch.save(state, tmp_path / "ranks" / name)
    (tmp_path / "mapping.json").write_text(json.dumps({"*.column": 0, "*.row": 1, "norm": "replicate"}))
    (tmp_path / "rename.json").write_text(json.dumps({"norm": "last.norm", "a.row": None}))
    words = ["--ranks", "rank*.pt", "--mapping", tmp_path / "mapping.json", "--rename", tmp_path / "rename.json"]
    command = [locate.agent_path(), "restore", tmp_path / "ranks", "--hf", tmp_path / "out", *words]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert equal(weights(tmp_path / "out"), {"a.column": whole["a.column"], "last.norm": whole["norm"]})


def test_the_directory_has_a_card_with_the_checkpoints_of_the_training_unless_the_configuration_brings_one(nm, tmp_path):
    for step, loss in ((1, 0.5), (2, 0.25), (3, None)):
        with nm.Checkpoint(f"global_step{step}", metrics={} if loss is None else {"val|loss": loss}) as checkpoint:
            checkpoint.save("model.pt", state_of())
        checkpoint.wait("durable", 60)
    nm.export_hf("global_step2", tmp_path / "out", config={"model_type": "mine"})
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- nebula-checkpoint\n---\n\n# global_step2\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in card.splitlines() if line.startswith("|")]
    assert [(row[0], row[1], row[-1]) for row in rows[2:]] == [("global_step3", "3", ""), ("**global_step2**", "2", "0.25"), ("global_step1", "1", "0.5")]
    assert rows[0][-1] == "val&#124;loss" and "nebula restore global_step2 --hf DIR --path " in card
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "README.md").write_text("my own card")
    nm.export_hf("global_step2", tmp_path / "own", config=tmp_path / "base")
    assert (tmp_path / "own" / "README.md").read_text() == "my own card"
