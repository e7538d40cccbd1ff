#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "capture/cow_private.h"

#define MAPS_PATH "/proc/self/maps"
#define MAPS_TEXT_MAX (256u << 20)

static const char *parse_hex(const char *text, uint64_t *ret_value)
{
        uint64_t value = 0;

        for (;; text++) {
                if (*text >= '0' && *text <= '9')
                        value = value << 4 | (uint64_t)(*text - '0');
                else if (*text >= 'a' && *text <= 'f')
                        value = value << 4 | (uint64_t)(*text - 'a' + 10);
                else
                        break;
        }
        *ret_value = value;
        return text;
}

/* A line is: start-end rwxp offset major:minor inode path. A line that does not parse counts as not anonymous. */
static void parse_line(const char *line, struct os_mapping *ret_mapping)
{
        uint64_t offset, major, minor, inode;
        bool private, is_writable, is_file;

        memset(ret_mapping, 0, sizeof *ret_mapping);
        line = parse_hex(line, &ret_mapping->start);
        if (*line++ != '-')
                return;
        line = parse_hex(line, &ret_mapping->end);
        if (strcspn(line, "\n") < sizeof " rwxp 0 0:0 0" - 1)
                return;
        private = line[4] == 'p';
        is_writable = line[2] == 'w';
        line = parse_hex(line + 6, &offset);
        line = parse_hex(line + 1, &major);
        line = parse_hex(line + 1, &minor);
        if (*line != ' ')
                return;
        parse_hex(line + 1, &inode); /* decimal, but only zero matters */
        is_file = inode || major || minor;
        ret_mapping->private_anonymous = private && !is_file;
        ret_mapping->private_file = private && is_writable && is_file;
}

static enum nebula_status read_text(int fd, char **ret_text, struct nebula_error *error)
{
        size_t size = 0, capacity = 64u << 10;
        char *text = malloc(capacity);
        int64_t got;

        while (text) {
                if (capacity - size < 8192) {
                        char *grown = capacity < MAPS_TEXT_MAX ? realloc(text, capacity * 2) : NULL;

                        if (!grown)
                                break;
                        text = grown;
                        capacity *= 2;
                }
                got = os->read(fd, text + size, capacity - size - 1);
                if (got == -EINTR)
                        continue;
                if (got < 0) {
                        free(text);
                        return error_set(error, NEBULA_INTERNAL, (int)-got, "reading " MAPS_PATH);
                }
                size += (size_t)got;
                if (got == 0) {
                        text[size] = '\0';
                        *ret_text = text;
                        return NEBULA_OK;
                }
        }
        free(text);
        return error_set(error, NEBULA_NO_MEMORY, 0, "no memory to read" MAPS_PATH);
}

static enum nebula_status read_list(struct cow_maps *maps, struct nebula_error *error)
{
        enum nebula_status status;
        size_t line_count = 0;
        char *text = NULL;

        status = read_text(maps->fd, &text, error);
        if (status != NEBULA_OK)
                return status;
        for (const char *line = text; *line; line++)
                line_count += *line == '\n';
        maps->list = calloc(line_count + 1, sizeof *maps->list);
        if (!maps->list) {
                free(text);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for the list of mappings");
        }
        for (const char *line = text; maps->count < line_count; line = strchr(line, '\n') + 1)
                parse_line(line, &maps->list[maps->count++]);
        free(text);
        return NEBULA_OK;
}

enum nebula_status cow_maps_open(struct cow_maps *maps, struct nebula_error *error)
{
        struct os_mapping mapping;
        enum nebula_status status = NEBULA_OK;

        memset(maps, 0, sizeof *maps);
        maps->asked_block = UINT64_MAX;
        maps->fd = os->open(MAPS_PATH, OS_READ);
        if (maps->fd < 0)
                return error_set(error, NEBULA_UNAVAILABLE, -maps->fd, "opening " MAPS_PATH);
        /* Before Linux 6.11 only the text exists: about a microsecond per mapping. */
        if (os->find_mapping(maps->fd, 0, &mapping) < 0)
                status = read_list(maps, error);
        if (status != NEBULA_OK)
                os->close(maps->fd);
        else
                maps->pagemap_fd = os->open("/proc/self/pagemap", OS_READ);
        return status;
}

bool cow_maps_is_huge(struct cow_maps *maps, uint64_t block)
{
        if (maps->pagemap_fd < 0)
                return false;
        if (maps->asked_block != block) {
                maps->asked_block = block;
                maps->asked_is_huge = os->huge_page(maps->pagemap_fd, block) == 1;
        }
        return maps->asked_is_huge;
}

/* The first mapping that ends above `address`. */
static bool find_next(const struct cow_maps *maps, uint64_t address, struct os_mapping *ret_mapping)
{
        size_t low = 0, high = maps->count;

        if (!maps->list)
                return os->find_mapping(maps->fd, address, ret_mapping) == 0;
        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (maps->list[middle].end <= address)
                        low = middle + 1;
                else
                        high = middle;
        }
        if (low == maps->count)
                return false;
        *ret_mapping = maps->list[low];
        return true;
}

const struct os_mapping *cow_maps_find(struct cow_maps *maps, uint64_t address)
{
        struct os_mapping *found = &maps->found;

        if (address >= found->start && address < found->end)
                return found;
        if (find_next(maps, address, found) && found->start <= address)
                return found;
        *found = (struct os_mapping){ 0 };
        return NULL;
}

bool cow_maps_is_anonymous(struct cow_maps *maps, uint64_t start, uint64_t end)
{
        const struct os_mapping *mapping;

        for (uint64_t at = start; at < end; at = mapping->end) {
                mapping = cow_maps_find(maps, at);
                if (!mapping || !mapping->private_anonymous)
                        return false;
        }
        return true;
}

void cow_maps_close(struct cow_maps *maps)
{
        free(maps->list);
        if (maps->pagemap_fd >= 0)
                os->close(maps->pagemap_fd);
        os->close(maps->fd);
}
