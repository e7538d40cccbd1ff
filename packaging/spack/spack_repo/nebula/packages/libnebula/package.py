# libnebula with the command `nebula`: see packaging/README.md.
from pathlib import Path

from spack_repo.builtin.build_systems.meson import MesonPackage

from spack.package import depends_on, license, variant, version


class Libnebula(MesonPackage):
    """Checkpoints that cost almost nothing: a program saves in milliseconds, loses a process,
    and resumes exactly."""

    # The last commit of the checkout that has this recipe.
    git = Path(__file__).resolve().parents[6].as_uri()

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

    sanity_check_is_file = [
        "bin/nebula",
        "include/nebula.h",
        "lib/libnebula.so",
        "lib/pkgconfig/nebula.pc",
        "lib/cmake/nebula/nebulaConfig.cmake",
    ]

    def meson_args(self):
        uring = "enabled" if self.spec.satisfies("+io_uring") else "disabled"
        return [
            "-Dpython=false",
            "-Dwerror=false",
            "-Dmetrics_server=disabled",
            f"-Dio_uring={uring}",
        ]
