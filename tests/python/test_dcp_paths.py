"""torch.distributed.checkpoint in one process: several directories, directories of torch's own writer, and the log of a save."""

from __future__ import annotations

import inspect
import io
import os
import pickle
import resource
import shutil

import nebulaml as nm
import pytest
import torch
import torch.distributed.checkpoint as dcp
from nebulaml.dcp import NebulaStorageReader, NebulaStorageWriter, async_save
from nebulaml.dcp import reader as dcp_reader
from nebulaml.errors import NebulaStorageError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan

pytestmark = pytest.mark.filterwarnings("ignore")


def state(value):
    return {"w": torch.full((64, 32), float(value)), "b": torch.arange(7) + value, "step": value, "half": torch.full((3,), value).bfloat16()}


def save(path, value):
    dcp.save(state(value), storage_writer=NebulaStorageWriter(path))


def load(path):
    found = state(0)
    dcp.load(found, storage_reader=NebulaStorageReader(path))
    return found


def same(found, value):
    wanted = state(value)
    assert found.keys() == wanted.keys() and found["step"] == value
    assert all(torch.equal(found[name], wanted[name]) for name in ("w", "b", "half"))


def test_two_directories_in_one_process(place):
    one, two = place.root / "one" / "step1", place.root / "two" / "step1"
    for value in (1, 2):
        save(one, value), save(two, 10 * value)
    same(load(one), 2), same(load(two), 20)
    assert nm.flush_persistence()  # of both
    assert (one / ".metadata").exists() and (two / ".metadata").exists()
    found = state(0)
    dcp.load(found, checkpoint_id=two)  # torch's own reader
    same(found, 20)


@pytest.mark.skipif("use_collectives" not in inspect.signature(dcp.save).parameters, reason="this torch has no metadata of ranks")
def test_metadata_of_an_earlier_save_of_the_other_kind_counts_for_nothing(place):
    def save_alone(value):
        dcp.save({"pad": torch.zeros(4096), **state(value)}, storage_writer=NebulaStorageWriter(place.storage / "step1"), use_collectives=False)

    for forgets in (False, True):
        save(place.storage / "step1", 1)
        save_alone(2)
        if forgets:
            assert nm.flush_persistence()
            place.lose_memory()
        same(load(place.storage / "step1"), 2)
        assert nm.flush_persistence()
        found = state(0)
        dcp.load(found, checkpoint_id=place.storage / "step1")  # torch's own reader takes the metadata of all ranks if it can
        same(found, 2)
        save(place.storage / "step1", 3)
        same(load(place.storage / "step1"), 3)
        with pytest.raises(nm.NebulaNotFound, match="metadata of 'step1' is that of an earlier save"):
            NebulaStorageReader(place.storage / "step1").read_metadata(rank=0)


def test_a_save_in_the_background_by_one_process(place):
    for step in (1, 2):  # the second one by the plan of the first
        async_save(state(step), checkpoint_id=place.storage / f"step{step}").result(timeout=60)
        same(load(place.storage / f"step{step}"), step)


def test_a_directory_beside_that_of_init(place):
    nm.init(place.storage, 0)
    save(place.root / "elsewhere" / "step1", 3)
    with nm.Checkpoint("global_step1") as checkpoint:
        checkpoint.save("a", 1)
    assert nm.persist_path() == str(place.storage)
    same(load(place.root / "elsewhere" / "step1"), 3)
    assert nm.get_latest_checkpoint().tag == "global_step1"


def test_a_directory_of_torchs_own_writer_is_read(place):
    dcp.save(state(5), checkpoint_id=place.root / "stock" / "step1")
    same(load(place.root / "stock" / "step1"), 5)


class _Turned:
    """A registered extension of torch's writer: each byte is turned around."""

    @staticmethod
    def made():
        from torch.distributed.checkpoint import _extension

        class Turned(_extension.StreamTransformExtension):
            @staticmethod
            def registry_name():
                return "stream.turned"

            @staticmethod
            def from_descriptor(version):
                return Turned()

            def get_descriptor(self):
                return "stream.turned/1"

            def transform_to(self, output):
                class Writer(io.BytesIO):
                    def close(self):
                        output.write(bytes(255 - byte for byte in self.getvalue()))

                return Writer()

            def transform_from(self, input):  # noqa: A002
                return io.BytesIO(bytes(255 - byte for byte in input.read()))

        registry = _extension.ExtensionRegistry()
        registry.register(Turned)
        return Turned(), registry


@pytest.mark.skipif("_extensions" not in inspect.signature(dcp.FileSystemWriter).parameters, reason="this torch has no extensions")
def test_pieces_that_an_extension_of_torchs_writer_has_transformed_are_read_through_it(place):
    extension, registry = _Turned.made()
    folder = place.root / "stock" / "step1"
    dcp.save(state(5), storage_writer=dcp.FileSystemWriter(folder, _extensions=[extension]))
    found = state(0)
    dcp.load(found, storage_reader=NebulaStorageReader(folder, _extension_registry=registry))
    same(found, 5)
    with pytest.raises(CheckpointException, match=r"was saved through .*stream\.turned.*Unknown extension"):
        load(folder)


def test_a_copy_without_hidden_folders_and_a_link_are_read(place):
    save(place.storage / "step1", 4)
    assert nm.flush_persistence()
    nm._shutdown()
    place.kill_agent()
    shutil.copytree(place.storage / "step1", place.root / "copies" / "step1", ignore=shutil.ignore_patterns(".nebula"))
    same(load(place.root / "copies" / "step1"), 4)
    nm._shutdown()
    os.symlink(place.storage, place.root / "link")
    same(load(place.root / "link" / "step1"), 4)


def test_only_the_wanted_ranges_are_fetched(place, monkeypatch):
    save(place.storage / "step1", 6)
    assert nm.flush_persistence()
    fetched = []

    class Counted(dcp_reader._PlainFile):
        def fetch(self, offset, size):
            fetched.append(size)

    monkeypatch.setattr(dcp_reader, "_PlainFile", Counted)
    shutil.copytree(place.storage / "step1", place.root / "copies" / "step1", ignore=shutil.ignore_patterns(".nebula"))
    part = {"b": torch.zeros(7, dtype=torch.int64)}
    dcp.load(part, storage_reader=NebulaStorageReader(place.root / "copies" / "step1"))
    assert torch.equal(part["b"], torch.arange(7) + 6) and sum(fetched) < 3000


class Evil:
    def __reduce__(self):
        return (os.system, ("exit 1",))


@pytest.mark.parametrize(("module", "name"), [
    ("torch.distributed.checkpoint.filesystem", "ThreadPoolExecutor"), ("torch.distributed.checkpoint.filesystem", "FileSystemWriter"),
    ("torch.distributed.checkpoint.filesystem", "io.FileIO"), ("torch", "load"), ("os", "system"),
])  # fmt: skip
def test_metadata_builds_nothing_but_metadata(module, name):
    text = b"\x80\x04\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(nm.NebulaCorrupt, match="torch's writers never put there"):
        dcp_reader._MetadataUnpickler(io.BytesIO(text)).load()
    with pytest.raises(nm.NebulaCorrupt):
        dcp_reader._MetadataUnpickler(io.BytesIO(pickle.dumps(Evil()))).load()


CHUNK = b"ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n"


# fault (Storage): Metadata of DCP, or values in a file that is loaded with `weights_only`, were planted.
# result: Nebula builds only what torch's writers put there, and takes no more memory than the bytes say. No class or
# function of the process changes.
@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02" + CHUNK + b"N}X\x08\x00\x00\x00__init__cbuiltins\nset\ns\x86b.",  # attributes of a class
        b"\x80\x02" + CHUNK + b"}X\x08\x00\x00\x00__init__cbuiltins\nset\nsb.",
        b"\x80\x02ctorch.serialization\n_get_layout\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b.",  # of a function
        b"\x80\x02cbuiltins\ngetattr\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b.",
        b"\x80\x02Nr\xff\xff\xff\x0f.",  # a memo of 2 GiB
    ],
)
def test_metadata_change_no_class_and_no_function_and_take_no_more_memory_than_they_have_bytes(place, content):
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = [ChunkStorageMetadata.__init__, torch.serialization._get_layout.__defaults__, dcp_reader._enum_member.__defaults__]
    folder = place.root / "stock" / "step1"
    dcp.save(state(5), checkpoint_id=folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(nm.NebulaCorrupt):
        NebulaStorageReader(folder).read_metadata()
    after = [ChunkStorageMetadata.__init__, torch.serialization._get_layout.__defaults__, dcp_reader._enum_member.__defaults__]
    assert before == after
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 1 << 20, "KiB"  # the memo alone took 4 GiB


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"\x80\x04K\x01s.", b"\x80\x04h\x07.", b"\x00" * 40, pickle.dumps(7)], ids=range(6))
def test_damaged_metadata_are_named(place, content):
    folder = place.root / "stock" / "step1"
    dcp.save(state(5), checkpoint_id=folder)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(nm.NebulaCorrupt, match=rf"\.metadata of {folder} (is damaged|holds a int)"):
        NebulaStorageReader(folder).read_metadata()


def test_the_log_warns_of_a_folder_without_a_manifest_only_if_it_cannot_be_read(place, caplog):
    dcp.save(state(5), checkpoint_id=place.root / "stock" / "step1")
    same(load(place.root / "stock" / "step1"), 5)
    assert "manifest" not in caplog.text
    (place.root / "stock" / "step2").mkdir()
    with pytest.raises(CheckpointException):
        load(place.root / "stock" / "step2")
    assert "its folder is there, but has no manifest" in caplog.text


def test_metadata_that_lead_out_of_a_stock_directory_are_refused(place):
    folder = place.root / "stock" / "step1"
    dcp.save(state(5), checkpoint_id=folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointException, match="lies outside"):
        load(folder)


def test_a_save_that_failed_is_no_success(place, monkeypatch):
    nm.init(place.storage, 0, on_error="warn")
    monkeypatch.setattr(nm.Checkpoint, "_save_ranges", lambda *_: (_ for _ in ()).throw(nm.NebulaUnavailable("no agent")))
    with pytest.raises(CheckpointException, match="no agent"):
        save(place.storage / "step1", 1)
    place.root.joinpath("file").write_text("")
    with pytest.raises(CheckpointException, match="is not a directory"):
        save(place.root / "file" / "step1", 1)


def test_overwrite_false_refuses_what_is_there_and_stock_arguments_are_taken(place):
    path = place.storage / "step1"
    dcp.save(state(1), storage_writer=NebulaStorageWriter(path, overwrite=False, thread_count=4, single_file_per_rank=False))
    for writer in (NebulaStorageWriter(path, overwrite=False), NebulaStorageWriter(str(path) + "/", overwrite=False)):
        with pytest.raises(CheckpointException, match="overwrite=False"):
            dcp.save(state(2), storage_writer=writer)
    same(load(path), 1)
    with pytest.raises(TypeError, match="no argument nonsense"):
        NebulaStorageWriter(path, nonsense=1)


@pytest.mark.parametrize("tag", ["latest", ".nebula", "a%b"])
def test_a_name_that_stock_readers_would_not_find_is_refused(place, tag):
    with pytest.raises(CheckpointException, match="choose another name"):
        save(place.storage / tag, 1)


def test_the_metadata_have_the_numbers_of_the_save_and_of_the_load(place):
    save(place.storage / "step1", 1)
    reader = NebulaStorageReader(place.storage / "step1")
    meta = reader.read_metadata().storage_meta
    assert meta.save_id and meta.load_id and meta.save_id != meta.load_id


# fault (Storage): A tag is written again, and at a load one rank finds the new version and another one the earlier: it has not heard yet that all have saved.
# result: No rank loads, and all raise.
def test_ranks_do_not_load_two_versions_of_one_tag(place):
    path = place.storage / "newest"

    def plan():
        reader = NebulaStorageReader(path)
        reader.reset()
        return reader.prepare_local_plan(LoadPlan([]))

    save(path, 1)
    plans = [plan(), plan()]
    save(path, 2)
    plans.append(plan())
    reader = NebulaStorageReader(path)
    assert reader.prepare_global_plan(plans[:2]) == plans[:2]
    with pytest.raises(NebulaStorageError, match=r"rank 1 has found another version of .*/newest than rank 0"):
        reader.prepare_global_plan(plans[1:])
    same(load(path), 2)


# fault (Storage): One rank of a node cannot look for a checkpoint of torch.distributed.checkpoint, and the others can.
# result: The rank raises where torch tells all ranks, and none waits for another one.
@pytest.mark.parametrize("failure", [OSError("a disk"), NebulaStorageError("a store")])
def test_a_rank_whose_search_fails_raises_where_torch_tells_all_ranks(place, monkeypatch, failure):
    looks = []

    def fail(_):
        looks.append(1)
        raise failure

    save(place.storage / "step1", 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed, "is_initialized", lambda: True)
        patch.setattr(torch.distributed, "get_world_size", lambda: 2)
        patch.setattr(dcp_reader, "reading_session", fail)
        reader = NebulaStorageReader()
        reader.reset(place.storage / "step1")
        for step in (reader.read_metadata, lambda: reader.prepare_local_plan(LoadPlan([]))):
            with pytest.raises(type(failure), match=str(failure)):
                step()
        patch.setattr(torch.distributed, "get_world_size", lambda: 1)
        with pytest.raises(type(failure)):
            reader.reset()
    assert len(looks) == 2
    reader.reset()
    assert reader.read_metadata().state_dict_metadata


def test_a_planned_save_that_fails_after_its_files_gives_its_checkpoint_up(place, monkeypatch):
    def finish(*_, **__):
        raise OSError("on the coordinator")

    writer = NebulaStorageWriter(place.storage / "step1")
    monkeypatch.setattr(NebulaStorageWriter, "finish", finish)
    with pytest.raises(CheckpointException):
        async_save({"of this test": torch.ones(3, 5)}, storage_writer=writer)
    assert writer._save.checkpoint.state == "failed" and "on the coordinator" in writer._save.checkpoint.error
