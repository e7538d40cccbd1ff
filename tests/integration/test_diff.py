"""`nebula diff` and `nebula inspect --tensors`: tensors of every type, against torch's own arithmetic."""

import collections
import json
import subprocess

import pytest

torch = pytest.importorskip("torch")

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
OTHERS = [torch.bool, torch.complex64, torch.complex128]


@pytest.fixture
def put(maker, run, tmp_path):
    """Stores objects as the files of one version, each in the format of torch.save."""

    def call(tag, storage=None, **files):
        described = []
        for name, content in files.items():
            path = tmp_path / tag / f"{name}.pt"  # torch writes the name into the file
            path.parent.mkdir(exist_ok=True)
            torch.save(content, path)
            described += ["--file", f"{name}.pt={path}"]
        subprocess.run([maker, tmp_path / "store", tag, "--chunk", "4096", *described], check=True)
        if storage:
            assert run("copy", tmp_path / "store", storage, "--tag", tag).returncode == 0
        return storage or tmp_path / "store"

    return call


def random(dtype, *shape):
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[
        torch.empty((), dtype=dtype).element_size()
    ]
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype)
    return torch.randint(torch.iinfo(bits).min, torch.iinfo(bits).max, shape, dtype=bits).view(
        dtype
    )  # all patterns, NaN and infinities too


def compare(run, path, a, b, *more):
    told = run("diff", a, b, "--path", path, "--json", *more)
    assert told.returncode in (0, 1), told.stderr
    answer = json.loads(told.stdout)
    assert answer["equal"] == (told.returncode == 0)
    return answer, {row["name"]: row for file in answer["files"] for row in file.get("tensors", [])}


def as_number(value):
    return float(value) if isinstance(value, str) else value


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + OTHERS, ids=str)
def test_the_largest_difference_is_exact_for_every_type(run, put, dtype):
    torch.manual_seed(3)
    first = random(dtype, 3, 500)
    other, changed = random(dtype, 3, 500), torch.rand(3, 500) < 0.02
    as_bytes = [value.view(torch.uint8).reshape(3, 500, -1) for value in (first, other)]
    second = torch.where(changed.unsqueeze(-1), as_bytes[1], as_bytes[0]).reshape(3, -1).view(dtype)
    store = put("a", m={"w": first, "same": first, "n": 1})
    put("b", m={"w": second, "same": first, "n": 1})
    answer, rows = compare(run, store, "a", "b")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = first.element_size()
    as_bits = [
        value.contiguous().view(bits[size] if size < 16 else torch.int64).reshape(1500, -1) for value in (first, second)
    ]
    differing = (as_bits[0] != as_bits[1]).any(-1)
    assert answer["changed"] == 1 and answer["equal_tensors"] == 1 and set(rows) == {"w"}
    assert (
        rows["w"]["differing"] == int(differing.sum())
        and rows["w"]["elements"] == 1500
        and rows["w"]["shape"] == [3, 500]
    )
    assert rows["w"]["dtype"] == str(dtype).removeprefix("torch.")
    x, y = (
        value.reshape(-1)[differing].tolist()
        for value in (
            first.to(torch.float64) if dtype in FLOATS else first,
            second.to(torch.float64) if dtype in FLOATS else second,
        )
    )
    if dtype in FLOATS:
        distances = [0.0 if p == q else abs(p - q) for p, q in zip(x, y, strict=True) if not (p != p and q != q)]
    elif dtype.is_complex:
        distances = [max(abs(p.real - q.real), abs(p.imag - q.imag)) for p, q in zip(x, y, strict=True)]
    else:
        distances = [abs(int(p) - int(q)) for p, q in zip(x, y, strict=True)]
    expected = float("nan") if any(d != d for d in distances) else max(distances)
    found = as_number(rows["w"]["largest"])
    assert found == pytest.approx(expected, rel=0 if expected < 2**63 else 1e-15, nan_ok=True)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS + OTHERS, ids=str)
def test_norm_extremes_and_nans_are_those_of_torch(run, put, dtype):
    torch.manual_seed(4)
    tensor = random(dtype, 7, 90)
    store = put("a", m={"w": tensor, "turned": tensor.t(), "none": tensor[:0]})
    rows = {
        row["name"]: row
        for row in json.loads(run("inspect", "a", "m.pt", "--tensors", "--path", store, "--json").stdout)["tensors"]
    }
    flat = torch.view_as_real(tensor).reshape(-1) if dtype.is_complex else tensor.reshape(-1)
    values = flat.to(torch.float64)
    finite = values[values.isfinite()]
    for name in ("w", "turned"):
        assert as_number(rows[name]["norm"]) == pytest.approx(finite.square().sum().sqrt().item(), rel=1e-12)
        assert rows[name]["nan"] == int(values.isnan().sum()) and rows[name]["infinite"] == int(values.isinf().sum())
        assert rows[name]["min"] == finite.min().item() and rows[name]["max"] == finite.max().item()
    assert rows["turned"]["shape"] == [90, 7] and rows["none"]["elements"] == 0 and rows["none"]["norm"] == 0


def test_missing_new_and_reshaped_tensors_of_a_whole_training_state_are_named(run, put, storage):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def state():
        return {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ema": collections.defaultdict(list, {"x": [torch.ones(3)]}),
        }

    def train():
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()

    train()
    first = state()
    put("a", storage, all=first, whole=model)
    before = model[0].bias.detach().clone(), optimizer.state[model[0].bias]["exp_avg"].clone()
    train()
    second = state()
    second["model"]["extra"] = torch.zeros(2)
    del second["model"]["2.weight"]
    second["model"]["2.bias"] = second["model"]["2.bias"].view(2, 1)
    second["model"]["1.running_var"] = second["model"]["1.running_var"].double()
    path = put("b", storage, all=second, whole=model)
    _, rows = compare(run, path, "a", "b")
    results = {name: row["result"] for name, row in rows.items()}
    assert results["model.extra"] == "only in b" and results["model.2.weight"] == "only in a"
    assert results["model.2.bias"] == "other shape" and rows["model.2.bias"]["shape_b"] == [2, 1]
    assert results["model.1.running_var"] == "other dtype" and rows["model.1.running_var"]["dtype_b"] == "float64"
    assert "ema.x.0" not in results and "_modules.0._parameters.weight" in results
    for name, was, now in (
        ("model.0.bias", before[0], model[0].bias.detach()),
        ("optimizer.state.1.exp_avg", before[1], optimizer.state[model[0].bias]["exp_avg"]),
    ):
        assert rows[name]["largest"] == (was.double() - now.double()).abs().max().item()
    told = run("diff", "a", "b", "--path", path)
    assert (
        told.returncode == 1 and "largest difference" in told.stdout and "other shape, there float32 2x1" in told.stdout
    )
    assert run("diff", "a", "a", "--path", path).returncode == 0


def test_equal_files_are_not_read_and_equal_tensors_of_a_changed_file_neither(run, put, tmp_path):
    """The test has changed the bytes of these files, so a command that reads them finds wrong checksums."""
    big = torch.arange(100_000, dtype=torch.float32)
    store = put("a", same={"w": big}, part={"big": big, "small": torch.zeros(4)})
    put("b", same={"w": big}, part={"big": big, "small": torch.ones(4)})
    for path, skip in ((store / "a/same.pt", 60_000), (store / "a/part.pt", 60_000), (store / "b/part.pt", 90_000)):
        data = bytearray(path.read_bytes())
        data[skip] ^= 1
        path.write_bytes(data)
    answer, rows = compare(run, store, "a", "b")
    assert (
        answer["equal_files"] == 1
        and answer["equal_tensors"] == 1
        and rows["small"]["largest"] == 1
        and set(rows) == {"small"}
    )


def test_damage_is_named_when_it_is_met(run, put):
    store = put("a", m={"w": torch.zeros(5000)})
    put("b", m={"w": torch.ones(5000)})
    path = store / "b/m.pt"
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    told = run("diff", "a", "b", "--path", store, "--json")
    assert (
        told.returncode == 1 and json.loads(told.stdout)["error"]["status"] == "corrupt" and "byte 8192" in told.stderr
    )


def test_a_damaged_pickle_is_no_difference(run, put):
    around = {"before": "x" * 6000, "word": "hello", "behind": "x" * 6000}  # chunks of 4096 bytes, and no tensor in that of the word
    put("a", m=around | {"w": torch.zeros(30000)})
    store = put("b", m=around | {"w": torch.ones(30000)})
    assert compare(run, store, "a", "b")[0]["files"][0]["other_contents_equal"]
    path = store / "b/m.pt"
    damaged = path.read_bytes().replace(b"hello", b"jello")
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    told = run("diff", "a", "b", "--path", store)
    assert told.returncode == 1 and "m.pt: damaged between byte 4096 and 8192" in told.stderr


def test_versions_of_two_storages_and_hostile_names(run, put, make, tmp_path):
    name = "ev/il\033[31m<b>\u202e"
    torch.save({name: torch.zeros(3)}, tmp_path / "x.pt")
    put("a", m={name: torch.zeros(3)})
    make("a", "--file", f"m.pt={tmp_path}/x.pt", "other.pt=3", store=tmp_path / "there")
    told = run("diff", "a", "latest", "--path", "store", "--with", "there")
    assert told.returncode == 1 and "only in b" in told.stdout
    torch.save({name: torch.ones(3)}, tmp_path / "x.pt")
    make("c", "--file", f"m.pt={tmp_path}/x.pt", store=tmp_path / "there")
    told = run("diff", "a", "c", "--path", "store", "--with", "there")
    assert (
        "\033" not in told.stdout
        and "ev/il?[31m<b>" in told.stdout
        and "largest difference 1, 3 of 3 differ" in told.stdout
    )
    told = run("inspect", "a", "m.pt", "--tensors", "--path", "store")
    assert "\033" not in told.stdout and told.stdout.splitlines()[1].split()[1:3] == ["float32", "3"]


def test_no_name_hides_a_tensor(run, put):
    """Python's strings can hold text that is not valid UTF-8."""
    keys = ["\udcff", "\ud800", "b" + "ä" * 700]
    store = put("a", m={key: torch.zeros(3) for key in keys})
    put("b", m={key: torch.full((3,), float(value)) for value, key in enumerate(keys, 1)})
    answer = compare(run, store, "a", "b")[0]
    told = [(row["name"][:3], row["largest"]) for row in answer["files"][0]["tensors"]]
    assert answer["changed"] == 3 and told == [("???", 1.0), ("???", 2.0), ("bää", 3.0)]
    inspected = json.loads(run("inspect", "a", "m.pt", "--tensors", "--json", "--path", store).stdout)
    assert [row["name"][:3] for row in inspected["tensors"]] == ["???", "???", "bää"]


def test_files_without_tensors_are_compared_by_checksum(run, make):
    store = make("a", "--raw", "notes.txt", "m.pt=3")
    make("b", "--raw", "notes.txt", "m.pt=3")
    assert run("diff", "a", "b", "--path", store).returncode == 0
    assert run("inspect", "a", "notes.txt", "--tensors", "--path", store).returncode == 2
    assert run("inspect", "a", "--tensors", "--path", store).returncode == 2
