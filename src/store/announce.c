#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/announce.h"
#include "store/document.h"
#include "store/line_document.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "sum/sum.h"

bool announce_same(const struct announce_of *a, const struct announce_of *b)
{
        return a->writing == b->writing && a->world == b->world && !strcmp(a->tag, b->tag) && !strcmp(a->job, b->job) &&
               !strcmp(a->run, b->run);
}

static void path_of(const char *kind, const struct announce_of *of, const char *end, char ret_path[ANNOUNCE_PATH_MAX])
{
        char writing[WRITING_MAX];

        writing_prefix(of->job, of->run, of->writing, writing);
        writing[strlen(writing) - 1] = 0; /* the last '-' */
        snprintf(ret_path, ANNOUNCE_PATH_MAX, MANIFEST_DIRECTORY "/%s-%s%s", kind, writing, end);
}

void captured_path(const struct captured *captured, const char *text, size_t size, char ret_path[ANNOUNCE_PATH_MAX])
{
        char end[48];

        snprintf(end, sizeof end, "-%05" PRIu32 "-%016" PRIx64 ".json", captured->ranks[0].rank, sum_crc64(0, text, size));
        path_of("captured", &captured->of, end, ret_path);
}

void committed_path(const struct announce_of *of, char ret_path[ANNOUNCE_PATH_MAX])
{
        path_of("committed", of, ".json", ret_path);
}

void wanted_path(const struct announce_of *of, char ret_path[ANNOUNCE_PATH_MAX])
{
        path_of("wanted", of, ".json", ret_path);
}

void captured_prefix(const struct announce_of *of, char ret_prefix[ANNOUNCE_PATH_MAX])
{
        path_of("captured", of, "-", ret_prefix);
}

void committed_prefix(const struct announce_of *of, char ret_prefix[ANNOUNCE_PATH_MAX])
{
        committed_path(of, ret_prefix);
        strcpy(strrchr(ret_prefix, '-') + 1, ""); /* without the number */
}

/* Reads the number of a writing and of a rank: decimal digits that end with `end`. */
static bool take_number(const char **text, uint64_t most, char end, uint64_t *ret_number)
{
        size_t digits = strspn(*text, "0123456789");

        if (!digits || digits > 19 || (*text)[digits] != end)
                return false;
        *ret_number = strtoull(*text, NULL, 10);
        *text += digits + 1;
        return *ret_number <= most;
}

bool announce_name_parse(const char *name, struct announce_name *ret_name)
{
        static const char *const kinds[] = { "captured-", "committed-", "wanted-" };
        const char *hex = "0123456789abcdef", *at = NULL, *writing;
        struct announce_name parsed = { 0 };
        uint64_t rank;
        bool is_captured = !strncmp(name, kinds[0], strlen(kinds[0]));

        for (size_t i = 0; i < sizeof kinds / sizeof *kinds && !at; i++)
                if (!strncmp(name, kinds[i], strlen(kinds[i])))
                        at = name + strlen(kinds[i]);
        writing = at;
        if (!at || *at != 'w' || strspn(at + 1, hex) != WRITING_RUN_CHARS - 1 || at[WRITING_RUN_CHARS] != '-')
                return false;
        at += WRITING_RUN_CHARS + 1;
        if (!take_number(&at, DOCUMENT_NUMBER_MAX, is_captured ? '-' : '.', &parsed.number))
                return false;
        snprintf(parsed.writing, sizeof parsed.writing, "%.*s-", (int)(at - writing) - 1, writing);
        if (!is_captured)
                at--;
        else if (!take_number(&at, UINT32_MAX, '-', &rank) || strspn(at, hex) != 16)
                return false;
        else
                at += 16;
        parsed.rank = is_captured ? (uint32_t)rank : 0;
        if (strcmp(at, ".json"))
                return false;
        *ret_name = parsed;
        return true;
}

static json_t *begin(const char *kind, const struct announce_of *of, uint64_t sequence)
{
        json_t *body = document_new(kind);
        json_t *head = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I}", "tag", of->tag, "job", of->job, "run", of->run, "writing",
                                 (json_int_t)of->writing, "world", (json_int_t)of->world, "sequence", (json_int_t)sequence);

        if (!body || !head || json_object_update(body, head)) {
                json_decref(body);
                body = NULL;
        }
        json_decref(head);
        return body;
}

static enum nebula_status finish(json_t *body, bool failed, const struct announce_of *of, uint64_t sequence,
                                 char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        enum nebula_status status = document_check_numbers(of->tag, of->writing, sequence, error);

        if (!status)
                status = failed ? error_set(error, NEBULA_INVALID, 0, "cannot announce \"%s\": a name is not UTF-8, or memory is out",
                                            of->tag) :
                                  document_format(body, ret_text, ret_size, error);
        json_decref(body);
        return status;
}

enum nebula_status captured_format(const struct captured *captured, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = begin("captured", &captured->of, captured->sequence);
        json_t *ranks = json_array();
        int failed = !body || !ranks;

        for (size_t i = 0; !failed && i < captured->rank_count; i++)
                failed = json_array_append_new(ranks, json_pack("[I, I]", (json_int_t)captured->ranks[i].rank,
                                                                (json_int_t)captured->ranks[i].files));
        failed = failed || json_object_set_new(body, "host", json_string(captured->host)) ||
                 json_object_set_new(body, "pid", json_integer(captured->pid)) ||
                 (captured->goes_back && json_object_set_new(body, "after", json_integer(captured->after))) || json_object_set(body, "ranks", ranks);
        json_decref(ranks);
        return finish(body, failed, &captured->of, captured->sequence, ret_text, ret_size, error);
}

enum nebula_status committed_format(const struct committed *committed, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = begin("committed", &committed->of, committed->sequence);
        json_t *ranks = json_array();
        int failed = !body || !ranks;

        for (size_t i = 0; !failed && i < committed->rank_count; i++)
                failed = json_array_append_new(ranks, json_integer(committed->ranks[i]));
        failed = failed || !line_format(&committed->line, body) || json_object_set_new(body, "persist", json_boolean(committed->persist)) ||
                 json_object_set_new(body, "nodes", json_integer((json_int_t)committed->node_count)) ||
                 (*committed->given_up && json_object_set_new(body, "given_up", json_string(committed->given_up))) ||
                 json_object_set(body, "ranks", ranks);
        json_decref(ranks);
        return finish(body, failed, &committed->of, committed->sequence, ret_text, ret_size, error);
}

static void parse_head(struct document_reader *reader, const json_t *body, struct announce_of *of, uint64_t *sequence)
{
        document_text(reader, body, "tag", 0, of->tag, sizeof of->tag);
        document_text(reader, body, "job", 1, of->job, sizeof of->job);
        document_text(reader, body, "run", 1, of->run, sizeof of->run);
        of->writing = document_writing(reader, body);
        of->world = document_world(reader, body);
        *sequence = document_sequence(reader, body);
}

/* Reads one rank of the list: an integer above the rank before it and below the world. */
static uint32_t parse_rank(struct document_reader *reader, const json_t *value, uint32_t world, int64_t before)
{
        json_int_t rank = json_integer_value(value);

        if (!json_is_integer(value) || rank <= before || rank >= (json_int_t)world) {
                document_wrong(reader, "ranks", "is not an ascending list of ranks of the world");
                return 0;
        }
        return (uint32_t)rank;
}

static size_t begin_ranks(struct document_reader *reader, const json_t *ranks)
{
        size_t count = reader->status ? 0 : json_array_size(ranks);

        if (!reader->status && !count)
                document_wrong(reader, "ranks", "is empty");
        return count;
}

static enum nebula_status no_memory(struct document_reader *reader, size_t count)
{
        reader->status = error_set(reader->error, NEBULA_NO_MEMORY, 0, "no memory for %zu ranks", count);
        return reader->status;
}

enum nebula_status captured_parse(const char *text, size_t size, struct captured *ret_captured, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "captured", .error = error };
        struct captured captured = { 0 };
        json_t *body, *ranks;
        size_t count;
        enum nebula_status status = document_parse(text, size, "captured", &body, error);

        if (status)
                return status;
        parse_head(&reader, body, &captured.of, &captured.sequence);
        document_text(&reader, body, "host", 1, captured.host, sizeof captured.host);
        captured.pid = (uint32_t)document_u64(&reader, body, "pid", UINT32_MAX);
        captured.goes_back = json_object_get(body, "after") != NULL;
        captured.after = captured.goes_back ? document_step(&reader, body, "after") : 0;
        ranks = document_array(&reader, body, "ranks");
        count = begin_ranks(&reader, ranks);
        if (count && !(captured.ranks = calloc(count, sizeof *captured.ranks)))
                no_memory(&reader, count);
        for (size_t i = 0; i < count && !reader.status; i++) {
                const json_t *pair = json_array_get(ranks, i), *files = json_array_get(pair, 1);
                int64_t before = i ? (int64_t)captured.ranks[i - 1].rank : -1;

                captured.ranks[i].rank = parse_rank(&reader, json_array_get(pair, 0), captured.of.world, before);
                if (!json_is_integer(files) || json_integer_value(files) < 0 || json_integer_value(files) > UINT32_MAX)
                        document_wrong(&reader, "ranks", "has an impossible number of files");
                else
                        captured.ranks[i].files = (uint32_t)json_integer_value(files);
                captured.rank_count = i + 1;
        }
        json_decref(body);
        if (reader.status) {
                captured_done(&captured);
                return reader.status;
        }
        *ret_captured = captured;
        return NEBULA_OK;
}

enum nebula_status committed_parse(const char *text, size_t size, struct committed *ret_committed, struct nebula_error *error)
{
        struct document_reader reader = { .kind = "committed", .error = error };
        struct committed committed = { 0 };
        json_t *body, *ranks;
        size_t count;
        enum nebula_status status = document_parse(text, size, "committed", &body, error);

        if (status)
                return status;
        parse_head(&reader, body, &committed.of, &committed.sequence);
        line_parse(&reader, body, &committed.line);
        if (!reader.status && line_began(&committed.line) > committed.sequence) /* such a manifest could not be read */
                document_wrong(&reader, "line", "began after this version");
        committed.persist = json_is_true(json_object_get(body, "persist"));
        committed.node_count = (size_t)document_u64(&reader, body, "nodes", DOCUMENT_WORLD_MAX);
        ranks = document_array(&reader, body, "ranks");
        if (json_object_get(body, "given_up"))
                document_text(&reader, body, "given_up", 0, committed.given_up, sizeof committed.given_up);
        if (*committed.given_up && json_array_size(ranks))
                document_wrong(&reader, "ranks", "is not empty, although the version was given up");
        count = *committed.given_up ? 0 : begin_ranks(&reader, ranks);
        if (count && !(committed.ranks = calloc(count, sizeof *committed.ranks)))
                no_memory(&reader, count);
        for (size_t i = 0; i < count && !reader.status; i++) {
                committed.ranks[i] = parse_rank(&reader, json_array_get(ranks, i), committed.of.world,
                                                i ? (int64_t)committed.ranks[i - 1] : -1);
                committed.rank_count = i + 1;
        }
        json_decref(body);
        if (reader.status) {
                committed_done(&committed);
                return reader.status;
        }
        *ret_committed = committed;
        return NEBULA_OK;
}

void captured_done(struct captured *captured)
{
        free(captured->ranks);
        captured->ranks = NULL;
        captured->rank_count = 0;
}

void committed_done(struct committed *committed)
{
        free(committed->ranks);
        committed->ranks = NULL;
        committed->rank_count = 0;
}
