#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "store/announce.h"
#include "store/document.h"
#include "store/line_document.h"
#include "store/manifest.h"

bool announce_same(const struct announce_of *a, const struct announce_of *b)
{
        return a->writing == b->writing && a->world == b->world && !strcmp(a->tag, b->tag) && !strcmp(a->job, b->job) &&
               !strcmp(a->run, b->run);
}

void captured_path(uint32_t lowest_rank, uint64_t writing, char ret_path[64])
{
        if (writing <= 1)
                snprintf(ret_path, 64, MANIFEST_DIRECTORY "/captured-%05" PRIu32 ".json", lowest_rank);
        else
                snprintf(ret_path, 64, MANIFEST_DIRECTORY "/captured-%05" PRIu32 ".w%" PRIu64 ".json", lowest_rank, writing);
}

bool captured_is_of(const char *name, uint64_t writing)
{
        char end[32];
        size_t digits;

        if (strncmp(name, "captured-", 9))
                return false;
        digits = strspn(name + 9, "0123456789");
        if (writing <= 1)
                snprintf(end, sizeof end, ".json");
        else
                snprintf(end, sizeof end, ".w%" PRIu64 ".json", writing);
        return digits && digits < 12 && !strcmp(name + 9 + digits, end);
}

static json_t *begin(const char *kind, const struct announce_of *of, uint64_t generation, uint64_t sequence)
{
        json_t *body = document_new(kind);
        json_t *head = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I}", "tag", of->tag, "job", of->job, "run", of->run, "writing",
                                 (json_int_t)of->writing, "world", (json_int_t)of->world, "generation", (json_int_t)generation,
                                 "sequence", (json_int_t)sequence);

        if (!body || !head || json_object_update(body, head)) {
                json_decref(body);
                body = NULL;
        }
        json_decref(head);
        return body;
}

static enum nebula_status finish(json_t *body, bool failed, const struct announce_of *of, uint64_t generation, uint64_t sequence,
                                 char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        enum nebula_status status = document_check_numbers(of->tag, generation, sequence, error);

        if (!status)
                status = failed ? error_set(error, NEBULA_INVALID, 0, "cannot announce \"%s\": a name is not UTF-8, or memory is out",
                                            of->tag) :
                                  document_format(body, ret_text, ret_size, error);
        json_decref(body);
        return status;
}

enum nebula_status captured_format(const struct captured *captured, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = begin("captured", &captured->of, captured->generation, captured->sequence);
        json_t *ranks = json_array();
        int failed = !body || !ranks;

        for (size_t i = 0; !failed && i < captured->rank_count; i++)
                failed = json_array_append_new(ranks, json_pack("[I, I]", (json_int_t)captured->ranks[i].rank,
                                                                (json_int_t)captured->ranks[i].files));
        failed = failed || json_object_set_new(body, "host", json_string(captured->host)) ||
                 json_object_set_new(body, "pid", json_integer(captured->pid)) ||
                 (captured->goes_back && json_object_set_new(body, "after", json_integer(captured->after))) || json_object_set(body, "ranks", ranks);
        json_decref(ranks);
        return finish(body, failed, &captured->of, captured->generation, captured->sequence, ret_text, ret_size, error);
}

enum nebula_status committed_format(const struct committed *committed, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        json_t *body = begin("committed", &committed->of, committed->generation, committed->sequence);
        json_t *ranks = json_array();
        int failed = !body || !ranks;

        for (size_t i = 0; !failed && i < committed->rank_count; i++)
                failed = json_array_append_new(ranks, json_integer(committed->ranks[i]));
        failed = failed || !line_format(&committed->line, body) || json_object_set_new(body, "persist", json_boolean(committed->persist)) ||
                 json_object_set_new(body, "nodes", json_integer((json_int_t)committed->node_count)) ||
                 json_object_set(body, "ranks", ranks);
        json_decref(ranks);
        return finish(body, failed, &committed->of, committed->generation, committed->sequence, ret_text, ret_size, error);
}

static void parse_head(struct document_reader *reader, const json_t *body, struct announce_of *of, uint64_t *generation,
                       uint64_t *sequence)
{
        document_text(reader, body, "tag", 0, of->tag, sizeof of->tag);
        document_text(reader, body, "job", 1, of->job, sizeof of->job);
        document_text(reader, body, "run", 1, of->run, sizeof of->run);
        of->writing = document_u64(reader, body, "writing", DOCUMENT_GENERATION_MAX);
        of->world = document_world(reader, body);
        *generation = document_generation(reader, body, UINT64_MAX);
        *sequence = document_sequence(reader, body);
        if (!reader->status && !of->writing)
                document_wrong(reader, "writing", "is 0");
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
        parse_head(&reader, body, &captured.of, &captured.generation, &captured.sequence);
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
        parse_head(&reader, body, &committed.of, &committed.generation, &committed.sequence);
        line_parse(&reader, body, &committed.line);
        if (!reader.status && line_began(&committed.line) > committed.sequence) /* such a manifest could not be read */
                document_wrong(&reader, "line", "began after this version");
        committed.persist = json_is_true(json_object_get(body, "persist"));
        committed.node_count = (size_t)document_u64(&reader, body, "nodes", DOCUMENT_WORLD_MAX);
        ranks = document_array(&reader, body, "ranks");
        count = begin_ranks(&reader, ranks);
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
