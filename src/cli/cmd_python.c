/*
 * nebula plan, nebula studio, nebula restore --hf: commands that the Python package implements. This program runs the Python of its own installation:
 * $NEBULA_PYTHON, else python3 in the directory of this program, else python3 on the PATH.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/target.h"
#include "os/os.h"
#include "os/process.h"

/* The first argument is the command's name. `import nebulaml` fails if the package is not installed, or was built for another Python.
 * The current directory is removed from the search path: a folder "nebulaml" in it may be another user's. */
static char script[] =
        "import sys\n"
        "sys.path[:] = [path for path in sys.path if path]\n"
        "name = sys.argv[1]\n"
        "try:\n"
        "    from nebulaml import commands\n"
        "except Exception as failure:\n"
        "    print(f'nebula: `nebula {name}` is part of the Python package nebulaml, which {sys.executable} cannot load ({failure}); '\n"
        "          'install it there, or set NEBULA_PYTHON to the Python that has it', file=sys.stderr)\n"
        "    sys.exit(4)\n"
        "sys.exit(commands.run(name, sys.argv[2:]))\n";

static bool find_beside(char path[TARGET_PATH_MAX])
{
        int length = os->readlink("/proc/self/exe", path, TARGET_PATH_MAX - sizeof "python3");
        struct os_stat stat;
        char *slash;

        if (length <= 0 || length >= (int)(TARGET_PATH_MAX - sizeof "python3"))
                return false;
        path[length] = '\0';
        slash = strrchr(path, '/');
        if (!slash)
                return false;
        memcpy(slash + 1, "python3", sizeof "python3");
        return !os->stat(path, true, &stat);
}

int command_python(int argc, char **argv)
{
        const char *chosen = getenv("NEBULA_PYTHON");
        char path[TARGET_PATH_MAX];
        char **arguments = calloc((size_t)argc + 4, sizeof *arguments);
        int result;

        if (!arguments) {
                cli_complain("no memory to start Python");
                return CLI_UNREACHABLE;
        }
        if (chosen && *chosen)
                snprintf(path, sizeof path, "%s", chosen);
        else if (!find_beside(path))
                snprintf(path, sizeof path, "python3");
        arguments[0] = path;
        arguments[1] = (char[]){ "-c" };
        arguments[2] = script;
        memcpy(arguments + 3, argv, (size_t)argc * sizeof *argv);
        result = os_process_become(arguments);
        free(arguments);
        cli_complain("`nebula %s` is part of the Python package nebulaml, and %s cannot be started: %s; set NEBULA_PYTHON to the Python that "
                     "has the package", argv[0], path, os_error_text(result));
        return CLI_UNREACHABLE;
}
