"""HDF5 and netCDF: files that h5py, xarray and netCDF4 hold in memory, killed and read again by them."""

import signal
import subprocess
import textwrap

import pytest
from conftest import directory_only, interpreter

BEGIN = """
    import io, os, signal, sys, h5py, netCDF4, numpy as np, xarray
    import nebulaml as nm
    nm.init(sys.argv[1], 0, on_error="raise")
    plate = np.arange(12.0).reshape(3, 4)
    field = xarray.Dataset({"heat": (("x", "y"), plate)}, coords={"x": [1, 2, 3]}, attrs={"step": 5})
"""
SAVE = """
    with h5py.File.in_memory() as file:
        file["plate"], file.attrs["step"] = plate, 5
        file.create_dataset("group/packed", data=plate, compression="gzip", chunks=(1, 4))
        file.flush()
        image = file.id.get_file_image()
    dataset = netCDF4.Dataset("any name", "w", memory=1)
    dataset.createDimension("x", 3)
    dataset.createVariable("line", "f8", ("x",))[:] = [1, 2, 3]
    with nm.Checkpoint("global_step5") as checkpoint:
        checkpoint.save_bytes("plate.h5", image)
        checkpoint.save_bytes("field.nc", field.to_netcdf(engine="h5netcdf"))
        checkpoint.save_bytes("line.nc", dataset.close())
    checkpoint.wait("durable", 120)
    os.kill(os.getpid(), signal.SIGKILL)
"""
LOAD = """
    latest = nm.get_latest_checkpoint()
    with h5py.File(io.BytesIO(latest.read_bytes("plate.h5"))) as file:
        assert (file["plate"][:] == plate).all() and (file["group/packed"][:] == plate).all() and file.attrs["step"] == 5
    assert xarray.load_dataset(io.BytesIO(latest.read_bytes("field.nc")), engine="h5netcdf").identical(field)
    with netCDF4.Dataset("any name", memory=latest.read_bytes("line.nc")) as dataset:
        assert list(dataset["line"][:]) == [1, 2, 3]
    with h5py.File(nm.get_latest_checkpoint_path("plate.h5")) as file:
        assert (file["plate"][:] == plate).all()
    assert xarray.load_dataset(nm.get_latest_checkpoint_path("field.nc")).identical(field)
    with netCDF4.Dataset(nm.get_latest_checkpoint_path("line.nc")) as dataset:
        assert list(dataset["line"][:]) == [1, 2, 3]
"""


@directory_only("h5py opens a path")
@pytest.mark.parametrize("place", ["memory", "storage"])
def test_files_of_hdf5_and_netcdf_are_read_again_after_sigkill(node, place):
    def run(code):
        command = [interpreter("hdf5"), "-c", textwrap.dedent(BEGIN + code), str(node.persist)]
        return subprocess.run(command, env=node.environment, capture_output=True, text=True, timeout=120)

    assert run(SAVE).returncode == -signal.SIGKILL
    if place == "storage":
        node.forget_memory()
    loaded = run(LOAD)
    assert loaded.returncode == 0, loaded.stderr
