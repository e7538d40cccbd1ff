"""The interpreters into which the extension module can be loaded."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest


def test_a_subinterpreter_is_refused_with_the_reason():
    interpreters = pytest.importorskip("_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters")
    code = f"""
import sys
sys.path[:] = {sys.path!r}
try:
    import nebulaml
except Exception as failure:
    print(type(failure).__name__, failure)
"""
    main = f"import {interpreters.__name__} as i; interpreter = i.create(); i.run_string(interpreter, {code!r})"
    done = subprocess.run([sys.executable, "-c", main], capture_output=True, text=True, check=False)
    assert "NebulaUnavailable" in done.stdout and "interpreter" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this interpreter is not free-threaded")
def test_a_free_threaded_interpreter_turns_its_gil_on_and_says_so():
    code = "import sys; import nebulaml._nebula; print(sys._is_gil_enabled())"
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n" and "GIL" in done.stderr


def test_a_second_load_in_one_process_is_refused_and_the_first_one_goes_on(place):
    output = place.run(
        """
        first = sys.modules.pop("nebulaml._nebula")
        try:
            import nebulaml._nebula
        except ImportError as failure:
            say(failure)
        sys.modules["nebulaml._nebula"] = first
        nm.init(sys.argv[1], 0)
        with nm.Checkpoint("global_step1") as checkpoint:
            checkpoint.save("a", torch.ones(3))
        say(nm.get_latest_checkpoint().load("a").sum().item())
        """,
        place.storage,
    )
    assert "cannot be loaded twice" in output and output.endswith("3.0\n")
