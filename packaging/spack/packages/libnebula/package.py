# The command `nebula`, the agent, libnebula and its headers for C, C++, Fortran and MPI. See packaging/README.md.
from spack.package import depends_on, license, variant, version
from spack_repo.builtin.build_systems.meson import MesonPackage


class Libnebula(MesonPackage):
    """Checkpoints that cost almost nothing: a program saves in milliseconds, loses a process, and resumes exactly."""

    license("Apache-2.0")

    version("0.2.0")

    variant("io_uring", default=True, description="Bulk I/O through io_uring")

    depends_on("c", type="build")
    depends_on("meson@1.1:", type="build")
    depends_on("python@3:", type="build")  # the manuals
    depends_on("pkgconfig", type="build")
    depends_on("curl@7.68:")
    depends_on("jansson@2.13:")
    depends_on("openssl@3:")
    depends_on("liburing", when="+io_uring")

    def meson_args(self):
        uring = "enabled" if self.spec.satisfies("+io_uring") else "disabled"
        return ["-Dpython=false", "-Dwerror=false", f"-Dio_uring={uring}", "-Dmetrics_server=disabled"]
