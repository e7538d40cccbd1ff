#include "cli/templates.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/human.h"
#include "cli/term.h"
#include "ipc/ipc.h"
#include "os/os.h"

#define FILE_PREFIX "template-"
#define PROGRAM "nebulaml.elastic import warm" /* of its command line */
#define PROC_LIMIT 65536

static char *read_proc(uint64_t pid, const char *name, size_t *ret_size)
{
        char path[64], *text = NULL;

        snprintf(path, sizeof path, "/proc/%" PRIu64 "/%s", pid, name);
        return os_read_file(path, PROC_LIMIT, &text, ret_size) ? NULL : text;
}

/* The number may belong to another process by now. */
static bool is_template(uint64_t pid)
{
        size_t size = 0;
        char *text = read_proc(pid, "cmdline", &size);
        bool found = text && memmem(text, size, PROGRAM, strlen(PROGRAM));

        free(text);
        return found;
}

static uint64_t memory_of(uint64_t pid)
{
        static const struct {
                const char *file, *field;
        } places[] = { { "smaps_rollup", "Pss:" }, { "status", "VmRSS:" } };
        uint64_t bytes = 0;

        for (size_t i = 0; i < CLI_COUNT(places) && !bytes; i++) {
                size_t size;
                char *text = read_proc(pid, places[i].file, &size), *field = text ? strstr(text, places[i].field) : NULL;

                bytes = field ? strtoull(field + strlen(places[i].field), NULL, 10) * 1024 : 0;
                free(text);
        }
        return bytes;
}

json_t *templates_list(void)
{
        json_t *list = json_array();
        struct ipc_place place;
        char name[256];
        struct os_dir *dir;

        if (!list || ipc_place_find(&place, NULL) || os->opendir(place.directory, &dir) < 0)
                return list;
        while (os->readdir(dir, name, sizeof name) > 0) {
                uint64_t pid = strncmp(name, FILE_PREFIX, strlen(FILE_PREFIX)) ? 0 : strtoull(name + strlen(FILE_PREFIX), NULL, 10);

                if (pid && is_template(pid))
                        json_array_append_new(list, json_pack("{s:I, s:I}", "pid", (json_int_t)pid, "memory_used", (json_int_t)memory_of(pid)));
        }
        os->closedir(dir);
        return list;
}

void templates_print(void)
{
        json_t *list = templates_list();
        char text[HUMAN_MAX];

        for (size_t i = 0; i < json_array_size(list); i++) {
                const json_t *one = json_array_get(list, i);

                term_print(STYLE_BOLD, "template ");
                printf("of warm workers, pid %" PRId64 ", memory %s\n", (int64_t)json_integer_value(json_object_get(one, "pid")),
                       human_size((uint64_t)json_integer_value(json_object_get(one, "memory_used")), text));
        }
        json_decref(list);
}
