/*
 * scale.c - measures the size of the documents of one version of a large job, and the time to write and read them.
 *
 *      scale [RANKS [RANKS_PER_NODE [FILES_PER_RANK [BYTES_PER_FILE]]]]
 *
 * The engine's own code writes and reads every document. Only the number of requests is an estimate; it follows from docs/protocol.md.
 * Prints a table in Markdown. Each time is the best of three.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/peers/member.h"
#include "agent/peers/placement.h"
#include "os/os.h"
#include "store/announce.h"
#include "store/document.h"
#include "store/manifest.h"
#include "store/manifest_keys.h"
#include "store/record.h"

#define RUN "elastic-0123456789abcdef/3"

struct shape {
        uint32_t ranks, per_node, files;
        uint64_t bytes;
};
struct result {
        size_t size;
        double format_ms, parse_ms;
};

static uint32_t node_count(const struct shape *shape)
{
        return (shape->ranks + shape->per_node - 1) / shape->per_node;
}

static void fail(const char *what, const struct nebula_error *error)
{
        fprintf(stderr, "scale: %s: %s\n", what, error->message);
        exit(1);
}

/* Formats and parses one document, best of three. The done function frees what was parsed. */
#define MEASURE(result, kind, value, type) \
        do { \
                (result) = (struct result){ .format_ms = 1e30, .parse_ms = 1e30 }; \
                for (int round = 0; round < 3; round++) { \
                        struct nebula_error error = { 0 }; \
                        struct type back; \
                        char *text; \
                        int64_t start = os->now_ns(), middle, end; \
                        if (kind##_format(value, &text, &(result).size, &error)) \
                                fail(#kind, &error); \
                        middle = os->now_ns(); \
                        if (kind##_parse(text, (result).size, &back, &error)) \
                                fail(#kind, &error); \
                        end = os->now_ns(); \
                        (result).format_ms = (double)(middle - start) / 1e6 < (result).format_ms ? (double)(middle - start) / 1e6 : \
                                                                                                   (result).format_ms; \
                        (result).parse_ms = (double)(end - middle) / 1e6 < (result).parse_ms ? (double)(end - middle) / 1e6 : \
                                                                                               (result).parse_ms; \
                        kind##_done(&back); \
                        free(text); \
                } \
        } while (0)

static void *allocate(size_t count, size_t size)
{
        void *memory = calloc(count + 1, size);

        if (!memory)
                fail("memory", &(struct nebula_error){ .message = "none" });
        return memory;
}

static void file_name(char *to, size_t size, uint32_t rank, uint32_t file)
{
        snprintf(to, size, file ? "bf16_zero_pp_rank_%u_mp_rank_%02u_optim_states.pt" : "zero_pp_rank_%u_mp_rank_%02u_model_states.pt", rank,
                 file);
}

static void describe_file(const struct shape *shape, uint32_t rank, uint32_t index, struct record_file *file)
{
        file_name(file->name, sizeof file->name, rank, index);
        file->rank = rank;
        file->size = shape->bytes;
        file->is_zip = true;
        file->chunk_bytes = IMAGE_CHUNK_BYTES;
        file->chunk_count = (size_t)((shape->bytes + IMAGE_CHUNK_BYTES - 1) / IMAGE_CHUNK_BYTES);
        file->chunks = allocate(file->chunk_count, sizeof *file->chunks);
        for (size_t i = 0; i < file->chunk_count; i++)
                file->chunks[i] = UINT64_MAX / (i + 3);
}

/* Measures the record of the last node. */
static struct result record_of(const struct shape *shape)
{
        struct record record = { .tag = "global_step500000", .run = RUN, .number = 1, .world = shape->ranks, .persisted = 1766312346.9 };
        uint32_t first = shape->ranks - shape->per_node;
        struct result result;

        writing_name(record.job, record.run, 1, UINT32_MAX, record.writing);
        record.ranks = allocate(shape->per_node, sizeof *record.ranks);
        record.files = allocate((size_t)shape->per_node * shape->files, sizeof *record.files);
        for (uint32_t rank = first; rank < shape->ranks; rank++) {
                record.ranks[record.rank_count++] = (struct record_rank){ rank, 1766312345.12, 1766312345.16 };
                for (uint32_t i = 0; i < shape->files; i++)
                        describe_file(shape, rank, i, &record.files[record.file_count++]);
        }
        MEASURE(result, record, &record, record);
        record_done(&record);
        return result;
}

static void add_node(const struct shape *shape, uint32_t first, struct manifest *manifest)
{
        struct manifest_record *record = &manifest->records[manifest->record_count++];
        struct nebula_error error;

        *record = (struct manifest_record){ .size = 10000, .sequence = 1766312345160000000, .rank = first, .crc64 = UINT64_MAX / (first + 3) };
        writing_name(manifest->job, manifest->run, 1, UINT32_MAX - first, record->writing);
        for (uint32_t rank = first; rank < first + shape->per_node && rank < shape->ranks; rank++)
                for (uint32_t i = 0; i < shape->files; i++) {
                        char name[MANIFEST_NAME_MAX];
                        struct manifest_file file = {
                                .name = name, .size = shape->bytes, .rank = rank, .record = (uint32_t)manifest->record_count - 1,
                        };

                        file_name(name, sizeof name, rank, i);
                        if (manifest_add_file(manifest, &file, &error))
                                fail("manifest", &error);
                }
}

static struct result manifest_of(const struct shape *shape)
{
        struct manifest manifest = { .tag = "global_step500000", .run = RUN, .number = 1, .writing = 1, .step = 500000,
                                     .sequence = 1766312345160000000, .world = shape->ranks };
        struct nebula_error failure;
        struct result result;

        if (manifest_reserve(&manifest, (size_t)shape->ranks * shape->files, shape->ranks, &failure))
                fail("manifest", &failure);
        for (uint32_t first = 0; first < shape->ranks; first += shape->per_node)
                add_node(shape, first, &manifest);
        MEASURE(result, manifest, &manifest, manifest);
        manifest_done(&manifest);
        return result;
}

static struct announce_of announcement(const struct shape *shape)
{
        return (struct announce_of){ .tag = "global_step500000", .run = "elastic-0123456789abcdef/3", .writing = 1, .world = shape->ranks };
}

static struct result captured_of(const struct shape *shape)
{
        struct captured captured = { .of = announcement(shape), .host = "gpu-node-0000.cluster.example", .pid = 4000000,
                                     .sequence = 1766312345160000000, .rank_count = shape->per_node };
        struct result result;

        captured.ranks = allocate(shape->per_node, sizeof *captured.ranks);
        for (uint32_t i = 0; i < shape->per_node; i++)
                captured.ranks[i] = (struct captured_rank){ shape->ranks - shape->per_node + i, shape->files };
        MEASURE(result, captured, &captured, captured);
        captured_done(&captured);
        return result;
}

static struct result committed_of(const struct shape *shape)
{
        struct committed committed = { .of = announcement(shape), .sequence = 1766312345160000000, .persist = true,
                                       .rank_count = shape->ranks, .node_count = node_count(shape) };
        struct result result;

        committed.ranks = allocate(shape->ranks, sizeof *committed.ranks);
        for (uint32_t i = 0; i < shape->ranks; i++)
                committed.ranks[i] = i;
        MEASURE(result, committed, &committed, committed);
        committed_done(&committed);
        return result;
}

static enum nebula_status node_format(const struct member *member, char **ret_text, size_t *ret_size, struct nebula_error *error)
{
        return member_format(member, ret_text, ret_size, error);
}

static enum nebula_status node_parse(const char *text, size_t size, struct member *ret_member, struct nebula_error *error)
{
        return member_read(text, size, ret_member, error);
}

static void node_done(struct member *member)
{
        (void)member;
}

static struct result node_of(void)
{
        struct member member = { .node = "gpu-node-0000.cluster.example", .address = "10.100.200.250", .port = 43210, .nonce = UINT64_MAX };
        struct result result;

        MEASURE(result, node, &member, member);
        return result;
}

static double placement_ms(uint32_t nodes)
{
        char (*names)[64] = allocate(nodes, sizeof *names);
        const char **members = allocate(nodes, sizeof *members);
        size_t *order = allocate(nodes, sizeof *order);
        double best = 1e30;

        for (uint32_t i = 0; i < nodes; i++) {
                snprintf(names[i], sizeof names[i], "gpu-node-%05u.cluster.example", i);
                members[i] = names[i];
        }
        for (int round = 0; round < 3; round++) {
                int64_t start = os->now_ns();
                double ms;

                if (placement_order(members, nodes, members[0], order) != nodes - 1)
                        fail("placement", &(struct nebula_error){ .message = "a member is missing" });
                ms = (double)(os->now_ns() - start) / 1e6;
                best = ms < best ? ms : best;
        }
        free(names);
        free(members);
        free(order);
        return best;
}

static void row(const char *name, uint32_t count, struct result result)
{
        printf("| `%s` | %u | %zu | %.2f | %.3f | %.3f |\n", name, count, result.size, (double)count * (double)result.size / 1e6,
               result.format_ms, result.parse_ms);
}

static uint32_t number(int argc, char **argv, int at, uint32_t fallback)
{
        unsigned long value = argc > at ? strtoul(argv[at], NULL, 10) : fallback;

        if (!value || value > DOCUMENT_WORLD_MAX)
                fail(argv[at], &(struct nebula_error){ .message = "is no number that fits" });
        return (uint32_t)value;
}

int main(int argc, char **argv)
{
        struct shape shape = { .ranks = number(argc, argv, 1, 16384), .per_node = number(argc, argv, 2, 8), .files = number(argc, argv, 3, 2) };
        uint32_t nodes;

        shape.bytes = argc > 4 ? strtoull(argv[4], NULL, 10) : UINT64_C(2) << 30;
        nodes = node_count(&shape);
        printf("%u ranks on %u nodes, %u files of %" PRIu64 " MiB per rank\n\n", shape.ranks, nodes, shape.files, shape.bytes >> 20);
        printf("| document | how many | bytes each | MB together | format ms | parse ms |\n| --- | --- | --- | --- | --- | --- |\n");
        row("captured-...json", nodes, captured_of(&shape));
        row("committed-...json", 1, committed_of(&shape));
        row("*.record-N.json", nodes, record_of(&shape));
        row("manifest-N.json", 1, manifest_of(&shape));
        row("nodes/N.json", nodes, node_of());
        printf("\nplacement over %u members: %.2f ms\n", nodes, placement_ms(nodes));
        return 0;
}
