"""Commands that map a stored file, while its disk fails."""

import json
import os
import subprocess

import pytest

torch = pytest.importorskip("torch")

# Each page of a file $TORN that a program maps read-only raises SIGBUS, as if its disk could not read it.
TORN = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int is_torn(int fd)
{
        char link[40], path[4096];
        const char *torn = getenv("TORN");
        ssize_t size;

        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        size = readlink(link, path, sizeof path - 1);
        path[size < 0 ? 0 : size] = 0;
        return size > 0 && torn && !strcmp(path, torn);
}

void *mmap(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
        void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, "mmap");

        if (fd >= 0 && !(protection & PROT_WRITE) && is_torn(fd))
                fd = memfd_create("torn", 0);
        return real(at, size, protection, flags, fd, offset);
}

void *mmap64(void *at, size_t size, int protection, int flags, int fd, off_t offset)
{
        return mmap(at, size, protection, flags, fd, offset);
}
"""


@pytest.fixture
def fail(tmp_path):
    """Returns the environment in which the file cannot be read through a mapping."""
    (tmp_path / "torn.c").write_text(TORN)
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", tmp_path / "torn.so", tmp_path / "torn.c", "-ldl"], check=True)
    return lambda file: {"LD_PRELOAD": str(tmp_path / "torn.so"), "TORN": os.path.realpath(file)}


@pytest.fixture
def stored(maker, tmp_path):
    for tag in ("a", "b"):
        path = tmp_path / tag / "model.pt"
        path.parent.mkdir()
        torch.save({"weight": torch.randn(3000)}, path)
        subprocess.run([maker, tmp_path / "store", tag, "--chunk", "4096", "--file", f"model.pt={path}"], check=True)
    return tmp_path / "store"


# fault (Storage): A disk fails while nebula inspect, diff, list --find or verify reads a file that the command has mapped.
# result: The command names the file and the reason. It ends by no signal, and prints nothing that it has not read.
def test_a_disk_that_fails_under_a_mapped_file_is_an_error_with_a_reason(run, stored, fail):
    failing = fail(stored / "b/model.pt")
    reason = f"{stored}/b/model.pt: a part of it cannot be read: it was cut off, or its disk fails"

    def call(*arguments):
        done = run(*arguments, "--path", stored, **failing)
        assert done.returncode >= 0, arguments
        return done

    for command in (("inspect", "b", "model.pt"), ("inspect", "b", "model.pt", "--tensors"), ("diff", "a", "b"), ("diff", "b", "a")):
        done = call(*command)
        assert (done.returncode, done.stdout) == (1, "") and reason in done.stderr, (command, done)
        done = call(*command, "--json")
        assert done.returncode == 1 and json.loads(done.stdout)["error"]["message"] == reason, (command, done)
    assert "unsound" in call("inspect", "b").stdout
    done = call("list", "--find", "weight")
    assert "a" in done.stdout and "the tensors of 1 files cannot be listed" in done.stderr
    done = call("verify", "b")
    assert done.returncode == 1 and reason in done.stdout
    assert run("verify", "b", "--path", stored).returncode == 0
