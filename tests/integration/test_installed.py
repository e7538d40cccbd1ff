"""The installation of `meson install`, and programs that use it through pkg-config."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import uuid

import processes
import pytest
from waiting import until

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("NEBULA_BUILD_DIR") or ROOT / "build")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    root = tmp_path_factory.mktemp("installed")
    meson = pathlib.Path(sys.executable).with_name("meson")
    subprocess.run([meson, "install", "-C", BUILD, "--no-rebuild", "--quiet"], check=True, env={**os.environ, "DESTDIR": str(root)})
    (nebula,) = root.glob("**/bin/nebula")
    return nebula.parents[1]


@pytest.fixture
def environment(prefix):
    """Returns the environment of an installation, with its own agent, which is stopped at the end."""
    name = uuid.uuid4().hex[:8]
    (library,) = prefix.glob("lib/**/libnebula.so")
    runtime, memory = f"/tmp/nb-{name}", f"/dev/shm/nb-{name}"
    made = {key: value for key, value in os.environ.items() if not key.startswith("NEBULA_")} | {
        "NEBULA_RUNTIME_DIR": runtime,
        "NEBULA_MEMORY_DIR": memory,
        "PKG_CONFIG_PATH": str(library.parent / "pkgconfig"),
        "LD_LIBRARY_PATH": str(library.parent),
        "PATH": f"{prefix / 'bin'}:{os.environ['PATH']}",
    }
    yield made
    subprocess.run(["nebula", "stop", "--now", "--yes"], env=made, capture_output=True, timeout=60)
    shutil.rmtree(runtime, ignore_errors=True)
    shutil.rmtree(memory, ignore_errors=True)


def test_a_program_in_cpp_finds_the_library_by_pkg_config_and_survives_sigkill(prefix, environment, tmp_path):
    flags = ["pkg-config", f"--define-variable=prefix={prefix}", "--cflags", "--libs", "nebula"]
    found = subprocess.run(flags, env=environment, capture_output=True, text=True, check=True).stdout.split()
    walk = tmp_path / "walk"
    source = ROOT / "examples/walk/walk.cpp"
    subprocess.run(["c++", "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", source, *found, "-o", walk], check=True)

    def run(*arguments):
        return subprocess.run([walk, *arguments], env=environment, capture_output=True, text=True, timeout=60)

    whole = run(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert run(tmp_path / "killed", "230").returncode == -9
    resumed = run(tmp_path / "killed")
    assert resumed.stdout.splitlines()[0] == "resuming from step 200", resumed
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.mark.nightly("test_a_program_in_cpp_finds_the_library_by_pkg_config_and_survives_sigkill")
def test_cpp_programs_save_and_load_by_containers_and_get_failures_as_exceptions(prefix, environment, tmp_path):
    warnings = ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wpedantic", "-Werror"]
    flags = flags_of(prefix, environment, "--cflags", "--libs")
    subprocess.run(["c++", "-std=c++17", *warnings, ROOT / "tests/integration/header.cpp", *flags, "-o", tmp_path / "header"], check=True)
    ran = subprocess.run([tmp_path / "header", tmp_path / "store"], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran
    assert ran.stdout.splitlines() == [
        "step1 2 12 66", "1 11", "any bytes", "1", 'invalid tensor "line" has another type in the checkpoint', "not_found",
    ]


def flags_of(prefix, environment, *which):
    command = ["pkg-config", f"--define-variable=prefix={prefix}", *which, "nebula"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()


def needs(program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: scripts/setup.sh test installs it")


def check_that_it_resumes(run, tmp_path):
    """Compares a whole run with one that is killed in step 230 and then continues from step 200."""
    whole = run(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.splitlines()[0] == "starting from step 0"
    assert run(tmp_path / "killed", "230").returncode != 0
    resumed = run(tmp_path / "killed")
    assert resumed.stdout.splitlines()[0] == "resuming from step 200", resumed
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.mark.nightly("test_arrays_of_fortran_come_back_and_are_torchs_in_reverse_order", "test_a_program_in_cpp_finds_the_library_by_pkg_config_and_survives_sigkill")
def test_a_program_in_fortran_survives_sigkill(prefix, environment, tmp_path):
    needs("gfortran")
    source, walk = prefix / "include/nebula.f90", tmp_path / "walk"
    fortran = ["gfortran", "-std=f2018", "-O2", "-Wall", "-Wextra", "-Werror", "-J", tmp_path, source, ROOT / "examples/fortran/walk.f90"]
    subprocess.run([*fortran, *flags_of(prefix, environment, "--libs"), "-o", walk], check=True)
    check_that_it_resumes(
        lambda *arguments: subprocess.run([walk, *arguments], env=environment, capture_output=True, text=True, timeout=60), tmp_path
    )


def test_arrays_of_fortran_come_back_and_are_torchs_in_reverse_order(prefix, environment, tmp_path):
    needs("gfortran")
    torch = pytest.importorskip("torch")
    flags = flags_of(prefix, environment, "--libs")
    subprocess.run(["gfortran", "-J", tmp_path, prefix / "include/nebula.f90", ROOT / "tests/integration/arrays.f90", *flags, "-o", tmp_path / "check"], check=True)
    ran = subprocess.run([tmp_path / "check", tmp_path / "store"], env=environment, capture_output=True, text=True, timeout=60)
    assert ran.stdout == 'array "line" of file "all.pt" has another type or shape in the checkpoint\n', ran
    assert ran.returncode == 1 and 'nebula: ' in ran.stderr and "none" in ran.stderr, ran  # the last load has no status: it ends the program
    (saved,) = (tmp_path / "store").glob("step1/**/all.pt")
    found = torch.load(saved)
    assert found["cube"].shape == (4, 3, 2) and found["cube"].flatten().tolist() == list(range(1, 25))
    assert found["number"].shape == () and found["number"] == 7 and found["wave"][0] == complex(1, -1)


@pytest.mark.nightly("test_cmake_takes_a_version_of_the_same_series_that_is_not_older_than_the_one_asked_for")
def test_a_project_of_cmake_finds_the_package(prefix, environment, tmp_path):
    needs("cmake"), needs("gfortran")
    source, other = ROOT / "examples/walk/walk.cpp", ROOT / "examples/fortran/walk.f90"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\nproject(walk CXX Fortran)\nset(CMAKE_CXX_STANDARD 17)\nfind_package(nebula 0.2 REQUIRED)\n"
        f"add_executable(walk {source})\ntarget_link_libraries(walk nebula::nebula)\n"
        f"add_executable(fwalk {other} ${{nebula_FORTRAN}})\ntarget_link_libraries(fwalk nebula::nebula)\n"
    )
    build = tmp_path / "build"
    subprocess.run(["cmake", "-S", tmp_path, "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    for program in ("walk", "fwalk"):
        ran = subprocess.run([build / program, tmp_path / f"store-{program}"], env=environment, capture_output=True, text=True, timeout=60)
        assert ran.stdout.startswith("starting from step 0\nstep 400 "), ran


def test_cmake_takes_a_version_of_the_same_series_that_is_not_older_than_the_one_asked_for(prefix, environment, tmp_path):
    needs("cmake")
    asked = {"0.2": True, "0.2.0": True, "0.2.99": False, "0.1": False, "0.3": False, "1.2": False, "0.2...0.9": True, "0.1...0.9": False, "0.2...<0.2.1": True}
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.19)\nproject(versions C)\n"
        f"foreach(version {' '.join(asked)})\n  find_package(nebula ${{version}} QUIET)\n"
        "  message(STATUS \"asked ${version}: ${nebula_FOUND}\")\nendforeach()\n"
    )
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert {version: found == "1" for version, found in re.findall(r"asked (\S+): (\d)", said)} == asked


@pytest.mark.nightly("test_cmake_takes_a_version_of_the_same_series_that_is_not_older_than_the_one_asked_for")
def test_the_build_does_without_cmake(tmp_path):
    (tmp_path / "broken.ini").write_text("[binaries]\ncmake = '/bin/false'\n")
    meson = pathlib.Path(sys.executable).with_name("meson")
    command = [meson, "setup", "-Dpython=false", "-Dwerror=false", "--native-file", tmp_path / "broken.ini", tmp_path / "build", ROOT]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


WARNINGS = ["-O2", "-Wall", "-Wextra", "-Werror"]


def built_with_mpi(source, prefix, environment, program):
    needs("mpicc"), needs("mpirun")
    flags = flags_of(prefix, environment, "--cflags", "--libs")
    subprocess.run(["mpicc", "-std=gnu17", *WARNINGS, source, *flags, "-o", program], check=True)
    return started_by_mpirun(program, environment)


def started_by_mpirun(program, environment):
    def run(ranks, *arguments):
        mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), program]
        return subprocess.run([*mpirun, *arguments], env=environment, capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize("others", [2, pytest.param(3, marks=pytest.mark.nightly("test_four_ranks_of_an_mpi_job_are_killed_and_others_continue"))])
def test_four_ranks_of_an_mpi_job_are_killed_and_others_continue(prefix, environment, tmp_path, others):
    run = built_with_mpi(ROOT / "examples/mpi/ring.c", prefix, environment, tmp_path / "ring")
    numbers = iter((1, 4, others))
    check_that_it_resumes(lambda *arguments: run(next(numbers), *arguments), tmp_path)


@pytest.mark.nightly
def test_blocks_of_rows_are_loaded_as_columns_by_another_number_of_ranks(prefix, environment, tmp_path):
    run = built_with_mpi(ROOT / "tests/integration/blocks.c", prefix, environment, tmp_path / "blocks")
    store = tmp_path / "store"

    def says(ranks, what):
        ran = run(ranks, store, what)
        assert ran.returncode == 0, ran
        said = [line.split(" ", 3) for line in sorted(ran.stdout.splitlines())]
        assert [line[0] for line in said] == [str(rank) for rank in range(ranks)], ran
        assert len({line[3] for line in said}) == 1, ran  # all ranks have the same status and message
        return said[0][1], sum(int(line[2]) for line in said), said[0][3]

    assert says(3, "load")[0] == "not_found"
    assert says(8, "save") == ("ok", 0, "")  # of 7 rows: one rank has none
    assert says(1, "load") == says(3, "load") == ("ok", 0, "")
    status, _, message = says(2, "save a long name")  # of which the file of another array could have the beginning
    assert status == "invalid" and "longer than 200 bytes" in message
    assert says(2, "load a long name")[0] == "invalid"
    assert says(3, "save overlaps") == ("ok", 0, "")
    assert says(1, "load") == says(2, "load") == ("ok", 0, "")
    assert says(3, "save a gap") == ("ok", 0, "")  # the blocks have more elements than the matrix
    status, _, message = says(2, "load")
    assert status == "corrupt" and "do not cover it" in message
    assert says(1, "save less") == ("ok", 0, "")
    status, _, message = says(2, "load")
    assert status == "corrupt" and "other data" in message
    assert says(8, "save") == ("ok", 0, "")
    status, _, message = says(2, "another type")  # that only one rank asks for
    assert status == "invalid" and "another type or shape" in message
    for file in store.glob("step1/**/matrix.5"):
        file.unlink()
    subprocess.run(["nebula", "stop", "--now", "--yes"], env=environment, capture_output=True, timeout=60)
    status, _, message = says(2, "load")
    assert status in ("not_found", "corrupt") and "matrix.5" in message


@pytest.mark.nightly("test_four_ranks_of_an_mpi_job_are_killed_and_others_continue", "test_arrays_of_fortran_come_back_and_are_torchs_in_reverse_order")
def test_blocks_of_a_fortran_program_are_loaded_by_another_number_of_ranks(prefix, environment, tmp_path):
    needs("mpifort"), needs("mpirun")
    include, program = prefix / "include", tmp_path / "blocks"
    shim = tmp_path / "shim.o"
    subprocess.run(["mpicc", "-std=gnu17", *WARNINGS, f"-I{include}", "-c", include / "nebula_mpi_fortran.c", "-o", shim], check=True)
    sources = [include / "nebula.f90", include / "nebula_mpi.f90", ROOT / "tests/integration/blocks.f90"]
    flags = flags_of(prefix, environment, "--libs")
    subprocess.run(["mpifort", "-std=f2018", *WARNINGS, "-J", tmp_path, *sources, shim, *flags, "-o", program], check=True)
    run, store = started_by_mpirun(program, environment), tmp_path / "store"
    assert run(3, store, "save").returncode == 0
    for ranks in (1, 2):
        loaded = run(ranks, store, "load")
        assert sorted(loaded.stdout.splitlines()) == [f"{rank} 0 T" for rank in range(ranks)], loaded


@pytest.fixture
def two_nodes(prefix, environment, tmp_path):
    """Returns run(*arguments), which starts two_nodes.c and returns the lines of its ranks, and lose(rank), which ends a node's agent; its memory may go, too."""
    built_with_mpi(ROOT / "tests/integration/two_nodes.c", prefix, environment, tmp_path / "two_nodes")

    def runs(*arguments, **variables):
        ran = started_by_mpirun(tmp_path / "two_nodes", environment | variables)(2, tmp_path / "store", *map(str, arguments))
        assert ran.returncode == 0, ran
        return [line.split(" ", 3)[1:] for line in sorted(ran.stdout.splitlines())]

    def lose(rank, memory=True):
        place = f"NEBULA_RUNTIME_DIR={environment['NEBULA_RUNTIME_DIR']}-{rank}"
        for pid in processes.agents(lambda variables: place in variables):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not processes.agents(lambda variables: place in variables), 60)
        if memory:
            shutil.rmtree(f"{environment['NEBULA_MEMORY_DIR']}-{rank}", ignore_errors=True)

    yield runs, lose
    for rank in (0, 1):
        lose(rank)
        shutil.rmtree(f"{environment['NEBULA_RUNTIME_DIR']}-{rank}", ignore_errors=True)


# fault (Deaths): An MPI job is killed when one rank has committed a version and the other has not, and a node of it is replaced.
# result: The next start saves the tag again, with the parts of that start alone.
def test_a_version_that_a_killed_mpi_job_has_left_half_saved_is_not_completed_by_the_next_start(two_nodes):
    run, lose = two_nodes
    assert run("half", "step2", 1)[1] == ["ok", "1", "step2"]
    lose(0)
    assert run("save", "step2", 2, "durable") == [["ok", "2", "step2"]] * 2
    assert run("load") == [["ok", "2", "step2"]] * 2


# fault (Deaths): The memory of one node of an MPI job is lost, and the other node's memory has a version that is not durable: another tag, or a tag written again.
# result: All ranks load the newest version that each of them has, and none loads another writing of its tag.
@pytest.mark.parametrize("tag", ["step1", pytest.param("step2", marks=pytest.mark.nightly("test_all_ranks_of_an_mpi_job_load_the_same_writing_after_one_node_has_lost_its_memory"))])
def test_all_ranks_of_an_mpi_job_load_the_same_writing_after_one_node_has_lost_its_memory(two_nodes, tag):
    run, lose = two_nodes
    assert run("save", "step1", 1, "durable") == [["ok", "1", "step1"]] * 2
    lose(0), lose(1)
    assert run("save", tag, 2, "committed", NEBULA_STORE_MBPS="0.01") == [["ok", "2", tag]] * 2
    lose(0, memory=False), lose(1)
    assert run("load") == [["ok", "1", "step1"]] * 2


INSTALL = "meson setup build-c -Dpython=false --prefix=/usr/local && meson install -C build-c && "
OVERLAYS = """
mount -t tmpfs tmpfs "$1"
for place in usr/local etc; do
        mkdir -p "$1/$place/upper" "$1/$place/work"
        mount -t overlay overlay -o "lowerdir=/$place,upperdir=$1/$place/upper,workdir=$1/$place/work" "/$place"
done
"""


EXAMPLES = {"heat": 700, "walk": 200, "fortran": 200, "mpi": 200, "rust": 200, "julia": 200}  # and the step from which each resumes


@pytest.mark.nightly("integration/test_heat.py::test_a_killed_run_ends_as_one_that_was_not", "test_a_program_in_cpp_finds_the_library_by_pkg_config_and_survives_sigkill")
@pytest.mark.parametrize(("example", "step"), EXAMPLES.items())
def test_the_commands_of_an_examples_readme_work_as_printed(environment, tmp_path, example, step):
    """Types them in a mount namespace, so that nothing stays in /usr/local. The install takes the build that the tests use."""
    for program in {"fortran": ["gfortran"], "mpi": ["mpicc", "mpirun"], "rust": ["rustc"], "julia": ["julia"]}.get(example, []):
        needs(program)
    command = ["unshare", "-m", "bash", "-ec", OVERLAYS, "", tmp_path]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs root and overlayfs")
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / "examples" / example / "README.md").read_text(), re.M | re.S)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ") or "\n$ " not in "\n" + block]
    assert lines[0].startswith(INSTALL)
    install = f"env -u PKG_CONFIG_PATH meson install -C '{BUILD}' --no-rebuild --quiet --destdir / && "
    script = "\n".join([lines[0].replace(INSTALL, install), *lines[1:]]).replace("/scratch", f"{tmp_path}/scratch")
    prepare = f"{OVERLAYS}ln -s '{ROOT}/examples' \"$1/examples\"\ncd \"$1\"\nset +e\n"
    own = {key: value for key, value in environment.items() if key not in ("LD_LIBRARY_PATH", "PKG_CONFIG_PATH")}
    own |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    own["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    typed = ["unshare", "-m", "bash", "-ec", prepare + script + "\nnebula stop --now --yes >&2\n", "", tmp_path]
    ran = subprocess.run(typed, env=own, capture_output=True, text=True, timeout=120)
    said = ran.stdout.splitlines()
    assert f"resuming from step {step}" in said and "starting from step 0" in said, ran
    assert "error" not in ran.stderr, ran.stderr
    if example == "heat":  # its commands also make a run that is not killed
        ends = [line for line in said if line.startswith("step 1000")]
        assert len(ends) == 2 and ends[0] == ends[1]


@pytest.fixture(scope="module")
def debian(prefix, tmp_path_factory):
    """Makes a root directory into which dpkg has installed both packages, and nothing else."""
    needs("dpkg-shlibdeps")
    place = tmp_path_factory.mktemp("deb")
    tree, root = place / "tree", place / "root"
    shutil.copytree(prefix, tree / "usr", symlinks=True)
    subprocess.run([ROOT / "scripts/deb.sh", "--from", tree, place], check=True, capture_output=True)
    for folder in ("info", "updates"):
        (root / "var/lib/dpkg" / folder).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    packages = sorted(place.glob("*.deb"))
    dpkg = ["dpkg", f"--root={root}", f"--log={place / 'log'}", "--force-depends", "--force-not-root", "--force-bad-path"]
    done = subprocess.run([*dpkg, "-i", *packages], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return root, packages, dpkg


@pytest.mark.nightly
def test_debian_packages_install_and_a_program_is_built_and_run_with_them(debian, environment, tmp_path):
    root, packages, dpkg = debian
    depends = {package.name.partition("_")[0]: subprocess.check_output(["dpkg-deb", "-f", package, "Depends"], text=True) for package in packages}
    assert "libc6 (>=" in depends["nebula-checkpoint"] and "libssl3" in depends["nebula-checkpoint"]
    assert depends["libnebula-dev"].startswith("nebula-checkpoint (= ")
    (library,) = root.glob("usr/lib/*/libnebula.so")
    own = {**environment, "LD_LIBRARY_PATH": str(library.parent), "PATH": f"{root}/usr/bin:{environment['PATH']}"}
    assert subprocess.run([root / "usr/bin/nebula", "--version"], env=own, capture_output=True, text=True, check=True).stdout.strip()
    for place in ("bash-completion/completions/nebula.bash", "zsh/site-functions/_nebula", "fish/vendor_completions.d/nebula.fish"):
        assert (root / "usr/share" / place).exists()
    assert (root / "usr/share/man/man1/nebula.1.gz").exists() and (root / "usr/share/man/man3/nebula.3.gz").exists()
    own["PKG_CONFIG_PATH"] = str(library.parent / "pkgconfig")
    walk, flags = tmp_path / "walk", flags_of(root / "usr", own, "--cflags", "--libs")
    subprocess.run(["c++", "-std=c++17", "-O2", ROOT / "examples/walk/walk.cpp", *flags, "-o", walk], check=True)
    check_that_it_resumes(
        lambda *arguments: subprocess.run([walk, *arguments], env=own, capture_output=True, text=True, timeout=60), tmp_path
    )
    subprocess.run([*dpkg, "-r", "libnebula-dev", "nebula-checkpoint"], check=True, capture_output=True)
    assert list(root.glob("usr/bin/*")) == list(root.glob("usr/lib/*/libnebula*")) == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_spack_installs_the_library_and_programs_built_with_it_resume():
    ran = subprocess.run([ROOT / "scripts/spack.sh"], capture_output=True, text=True)
    if ran.returncode == 77:
        pytest.skip(ran.stderr.strip().splitlines()[-1])
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    said = [line for line in ran.stdout.splitlines() if line.startswith("spack: ")]
    assert re.fullmatch(rf"spack: nebula \S+ is installed as {ROOT}/\.envs/spack/opt/.*/libnebula-.*/bin/nebula", said[0])
    assert [line.split()[1:5] for line in said[1:]] == [[name, "resumed", "after", "a"] for name in ("heat", "walk")]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_rattler_build_builds_both_packages_of_conda_and_programs_of_c_and_python_run_with_them():
    ran = subprocess.run([ROOT / "scripts/conda.sh"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    said = [line.removeprefix("conda: ") for line in ran.stdout.splitlines() if line.startswith("conda: ")]
    assert "stand-ins" in said[0]
    assert [re.match(r"built ([a-z-]+)-\d", line)[1] for line in said[1:3]] == ["libnebula", "nebula-checkpoint"]
    assert re.fullmatch(rf"nebula \S+ is installed as {ROOT}/\.envs/conda/prefix/bin/nebula", said[3])
    assert said[4].startswith("heat resumed after a kill: ")
    assert re.fullmatch(rf"nebulaml of {ROOT}/\.envs/conda/prefix/lib/python\S+ loads what it saved", said[5])
    assert len(said) == 6


def test_the_manuals_name_every_command_and_every_function(prefix, environment):
    def plain(name):
        (page,) = prefix.glob(f"share/man/**/{name}")
        return re.sub(r"\\f[BRI]|\\&", "", page.read_text()).replace("\\-", "-")

    overview = subprocess.run(["nebula", "help"], env=environment, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^  ([a-z]+) +\S", overview, re.M)
    assert len(commands) > 15
    manual, functions = plain("nebula.1"), plain("nebula.3")
    assert [name for name in commands if f"nebula {name}" not in manual] == []
    listed = re.findall(r"^ +(nebula_\w+);", (ROOT / "src/libnebula.map").read_text(), re.M)
    assert len(listed) > 40
    assert [name for name in listed if name not in functions] == []
