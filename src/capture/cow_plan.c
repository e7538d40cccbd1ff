#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "capture/cow_private.h"

#define GAP_BYTES (16u << 10) /* room for malloc's headers and padding */
#define ENDS_BYTES (16u << 20) /* copied at once, in 0.5 ms */

static int compare_parts(const void *a, const void *b)
{
        const struct cow_part *left = a, *right = b;

        return left->start < right->start ? -1 : left->start > right->start;
}

static void sort_parts(struct cow_part *parts, size_t count)
{
        for (size_t i = 1; i < count; i++) {
                if (parts[i].start < parts[i - 1].start) {
                        qsort(parts, count, sizeof *parts, compare_parts);
                        return;
                }
        }
}

/* A plan that is being built. */
struct plan {
        struct cow_maps maps;
        struct cow_part *parts;
        struct cow_span *spans;
        struct capture_part *direct; /* parts to copy at once; room for two pieces of each part, its ends */
        size_t part_count, span_count, span_capacity, direct_count;
        uint64_t span_mapping; /* start of the mapping that the last span ends in */
        bool joins_mappings;   /* the kernel protects across the border of two mappings */
        bool has_files;        /* a part lies in a private mapping of a file */
};

/* Whether the pages [start, end) between the last span and a part in `mapping` may be protected with the two. */
static bool can_join(struct plan *plan, uint64_t start, uint64_t end, uint64_t mapping)
{
        if (end - start > GAP_BYTES)
                return false;
        if (plan->span_mapping == mapping)
                return true;
        if (plan->joins_mappings && !cow_maps_is_anonymous(&plan->maps, start, end))
                return false;
        /* The kernel makes no huge page around a page that is missing. */
        if (plan->joins_mappings && start < end)
                os->advise((void *)(uintptr_t)start, end - start, OS_ADVISE_POPULATE_WRITE);
        return plan->joins_mappings;
}

/* Adds the pages [start, end) of the mapping that starts at `mapping`, except those in the last span. If an
 * allocator has put two parts side by side, the few pages between them are protected too: one span costs less than
 * two, and its pages can become huge ones while it is registered. */
static bool span_add(struct plan *plan, uint64_t start, uint64_t end, uint64_t mapping)
{
        struct cow_span *last = plan->span_count ? &plan->spans[plan->span_count - 1] : NULL;

        if (last && start < last->end)
                start = last->end;
        if (start >= end)
                return true;
        if (last && can_join(plan, last->end, start, mapping)) {
                last->end = end;
                plan->span_mapping = mapping;
                return true;
        }
        if (plan->span_count == plan->span_capacity) {
                size_t capacity = plan->span_capacity ? plan->span_capacity * 2 : 64;
                struct cow_span *grown = capacity > COW_SPAN_MAX ? NULL : realloc(plan->spans, capacity * sizeof *grown);

                if (!grown)
                        return false;
                plan->spans = grown;
                plan->span_capacity = capacity;
        }
        plan->spans[plan->span_count++] = (struct cow_span){ start, end };
        plan->span_mapping = mapping;
        return true;
}

/* Adds spans over a part's pages; none if one of its pages cannot be protected. */
static bool part_cover(struct plan *plan, const struct cow_part *part)
{
        size_t span_count = plan->span_count;
        uint64_t last_end = span_count ? plan->spans[span_count - 1].end : 0;
        uint64_t last_mapping = plan->span_mapping;
        uint64_t end = cow_page_ceil(part->end), until;
        const struct os_mapping *mapping;

        for (uint64_t at = cow_page_floor(part->start); at < end; at = until) {
                mapping = cow_maps_find(&plan->maps, at);
                if (!mapping)
                        goto refuse;
                plan->has_files |= mapping->private_file;
                until = end < mapping->end ? end : mapping->end;
                if (!mapping->private_anonymous || !span_add(plan, at, until, mapping->start))
                        goto refuse;
        }
        return true;
refuse:
        plan->span_count = span_count;
        plan->span_mapping = last_mapping;
        if (span_count)
                plan->spans[span_count - 1].end = last_end;
        return false;
}

/* Splits the parts: large ones are candidates for protection. */
static void candidates_find(struct plan *plan, const struct capture_part *parts, size_t count)
{
        for (size_t i = 0; i < count; i++) {
                uint64_t start = (uintptr_t)parts[i].data;

                if (parts[i].size < COW_PART_BYTES)
                        plan->direct[plan->direct_count++] = parts[i];
                else
                        plan->parts[plan->part_count++] =
                                (struct cow_part){ start, start + parts[i].size, 0, parts[i].image_offset, i };
        }
        sort_parts(plan->parts, plan->part_count);
}

/* Widens spans to whole huge pages. To protect a piece of a huge page would split it for good into small pages, each
 * of which then costs a protection of its own. */
static void spans_widen(struct plan *plan)
{
        struct cow_span *last = NULL;

        for (size_t i = 0; i < plan->span_count; i++) {
                struct cow_span span = plan->spans[i];
                uint64_t first_block = cow_block_of(span.start), last_block = cow_block_of(span.end);

                if (first_block != span.start && cow_maps_is_huge(&plan->maps, first_block))
                        span.start = first_block;
                if (last_block != span.end && cow_maps_is_huge(&plan->maps, last_block))
                        span.end = last_block + COW_BLOCK_BYTES;
                if (last && span.start < last->end) {
                        last->end = span.end;
                        continue;
                }
                last = last ? last + 1 : plan->spans;
                *last = span;
        }
        plan->span_count = last ? (size_t)(last - plan->spans) + 1 : 0;
}

/* The span without the shared huge pages at its ends. */
static struct cow_span span_inside(struct plan *plan, struct cow_span span)
{
        uint64_t first_block = cow_block_of(span.start), last_block = cow_block_of(span.end);

        if (first_block != span.start && cow_maps_is_huge(&plan->maps, first_block))
                span.start = first_block + COW_BLOCK_BYTES;
        if (last_block != span.end && cow_maps_is_huge(&plan->maps, last_block))
                span.end = last_block;
        if (span.end < span.start)
                span.end = span.start;
        return span;
}

/* Narrows spans if the shared pages hold few bytes of parts. The other user of such a page is usually the program's
 * heap, so the program's next line would wait for a copy of it. False: the shared pages hold too many bytes, and
 * nothing has changed. */
static bool spans_narrow(struct plan *plan)
{
        uint64_t bytes = 0;
        size_t kept = 0;

        for (size_t i = 0; i < plan->span_count && bytes <= ENDS_BYTES; i++) {
                struct cow_span inside = span_inside(plan, plan->spans[i]);

                bytes += plan->spans[i].end - plan->spans[i].start - (inside.end - inside.start);
        }
        if (bytes > ENDS_BYTES)
                return false;
        for (size_t i = 0; i < plan->span_count && bytes; i++) {
                struct cow_span inside = span_inside(plan, plan->spans[i]);

                if (inside.start < inside.end)
                        plan->spans[kept++] = inside;
        }
        plan->span_count = bytes ? kept : plan->span_count;
        return true;
}

static void add_direct(struct plan *plan, const struct cow_part *part, uint64_t start, uint64_t end)
{
        if (start < end)
                plan->direct[plan->direct_count++] = (struct capture_part){ (const void *)(uintptr_t)start, end - start,
                                                                            part->image_offset + (start - part->start) };
}

/* Copies at once the bytes that are no longer in a span. These are ends of parts, so what remains of a part is one piece. */
static void parts_narrow(struct plan *plan)
{
        size_t kept = 0, first = 0;

        for (size_t i = 0; i < plan->part_count; i++) {
                struct cow_part part = plan->parts[i];
                uint64_t start = part.end, end = part.end;

                while (first < plan->span_count && plan->spans[first].end <= part.start)
                        first++;
                if (first < plan->span_count && plan->spans[first].start < part.end) {
                        start = plan->spans[first].start > part.start ? plan->spans[first].start : part.start;
                        end = plan->spans[first].end;
                }
                for (size_t k = first + 1; k < plan->span_count && plan->spans[k].start == end; k++)
                        end = plan->spans[k].end;
                end = end < part.end ? end : part.end;
                add_direct(plan, &part, part.start, start);
                add_direct(plan, &part, end, part.end);
                if (start < end)
                        plan->parts[kept++] = (struct cow_part){ start, end, 0, part.image_offset + (start - part.start), part.turn };
        }
        plan->part_count = kept;
}

/* If the mappings cannot be read, nothing is protected; that is no failure. */
static void spans_find(struct plan *plan)
{
        bool is_known = cow_maps_open(&plan->maps, NULL) == NEBULA_OK;
        size_t kept = 0;

        for (size_t i = 0; i < plan->part_count; i++) {
                if (is_known && part_cover(plan, &plan->parts[i]))
                        plan->parts[kept++] = plan->parts[i];
                else
                        add_direct(plan, &plan->parts[i], plan->parts[i].start, plan->parts[i].end);
        }
        plan->part_count = kept;
        if (!is_known)
                return;
        if (spans_narrow(plan))
                parts_narrow(plan);
        else
                spans_widen(plan);
        cow_maps_close(&plan->maps);
}

/* If chunks is NULL, only counts. */
static size_t chunks_make(const struct plan *plan, struct cow_chunk *chunks)
{
        uint64_t last = UINT64_MAX;
        size_t count = 0;

        for (size_t i = 0; i < plan->span_count; i++) {
                for (uint64_t block = cow_block_of(plan->spans[i].start); block < plan->spans[i].end;
                     block += COW_BLOCK_BYTES) {
                        if (block == last)
                                continue;
                        last = block;
                        if (chunks)
                                chunks[count] = (struct cow_chunk){ .block = block, .image_offset = UINT64_MAX, .first_span = (uint32_t)i };
                        count++;
                }
        }
        return count;
}

/* Puts the chunk at the next place of the order. */
static void chunk_queue(struct cow_capture *capture, size_t index, uint32_t *turn)
{
        capture->chunks[index].turn = *turn;
        capture->order[(*turn)++] = (uint32_t)index;
}

/* Orders the chunks as their bytes stand in the image, whatever their addresses. Storage takes the start of the
 * image first, and programs usually change their memory in the same order. `by_turn` has room for all given parts. */
static void chunks_order(struct cow_capture *capture, const struct cow_part **by_turn, size_t turn_count)
{
        uint32_t turn = 0;

        memset(by_turn, 0, turn_count * sizeof *by_turn);
        for (size_t i = 0; i < capture->part_count; i++)
                by_turn[capture->parts[i].turn] = &capture->parts[i];
        for (size_t i = 0; i < turn_count; i++) {
                const struct cow_part *part = by_turn[i];

                for (size_t k = part ? cow_chunk_find(capture, cow_block_of(part->start)) : capture->chunk_count;
                     k < capture->chunk_count && capture->chunks[k].block < part->end; k++) {
                        struct cow_chunk *chunk = &capture->chunks[k];
                        uint64_t before = chunk->block > part->start ? chunk->block - part->start : 0;

                        if (chunk->image_offset == UINT64_MAX)
                                chunk_queue(capture, k, &turn);
                        if (part->image_offset + before < chunk->image_offset)
                                chunk->image_offset = part->image_offset + before;
                }
        }
        for (size_t k = 0; k < capture->chunk_count; k++) /* chunks of pages between parts */
                if (capture->chunks[k].image_offset == UINT64_MAX)
                        chunk_queue(capture, k, &turn);
        while (turn-- > 1) { /* so that the first unfinished chunk shows how far the image is final */
                struct cow_chunk *chunk = &capture->chunks[capture->order[turn - 1]];
                uint64_t later = capture->chunks[capture->order[turn]].image_offset;

                chunk->image_offset = chunk->image_offset < later ? chunk->image_offset : later;
        }
}

/* Makes the capture and its arrays in one mapping. Computes the reach of parts that overlap others. */
static enum nebula_status capture_make(const struct plan *plan, size_t given_count, struct cow_capture **ret_capture,
                                       struct nebula_error *error)
{
        size_t chunk_count = chunks_make(plan, NULL);
        uint64_t size = sizeof(struct cow_capture) + chunk_count * (sizeof(struct cow_chunk) + sizeof(uint32_t)) +
                        plan->span_count * sizeof(struct cow_span) + plan->part_count * sizeof(struct cow_part) +
                        plan->direct_count * sizeof(struct capture_part);
        const struct cow_part **by_turn = malloc((given_count ? given_count : 1) * sizeof *by_turn);
        struct cow_capture *capture = by_turn ? cow_capture_map(size) : NULL;
        uint64_t reach = 0;

        if (!capture) {
                free(by_turn);
                return error_set(error, NEBULA_NO_MEMORY, 0, "no memory for a capture of %zu parts", plan->part_count);
        }
        capture->direct = (struct capture_part *)(capture + 1);
        capture->direct_count = plan->direct_count;
        capture->has_files = plan->has_files;
        capture->parts = (struct cow_part *)(capture->direct + plan->direct_count);
        capture->part_count = plan->part_count;
        capture->spans = (struct cow_span *)(capture->parts + plan->part_count);
        capture->span_count = plan->span_count;
        capture->chunks = (struct cow_chunk *)(capture->spans + plan->span_count);
        capture->chunk_count = chunks_make(plan, capture->chunks);
        capture->order = (uint32_t *)(capture->chunks + capture->chunk_count);
        capture->blocks.left = capture->chunk_count;
        for (size_t i = 0; i < plan->part_count; i++) {
                capture->parts[i] = plan->parts[i];
                if (reach < plan->parts[i].end)
                        reach = plan->parts[i].end;
                capture->parts[i].reach = reach;
                capture->blocks.stats.protected_bytes += plan->parts[i].end - plan->parts[i].start;
        }
        if (plan->direct_count)
                memcpy(capture->direct, plan->direct, plan->direct_count * sizeof *plan->direct);
        if (plan->span_count)
                memcpy(capture->spans, plan->spans, plan->span_count * sizeof *plan->spans);
        chunks_order(capture, by_turn, given_count);
        free(by_turn);
        *ret_capture = capture;
        return NEBULA_OK;
}

enum nebula_status cow_plan(const struct cow_engine *engine, const struct capture_part *parts, size_t count,
                            struct cow_capture **ret_capture, struct nebula_error *error)
{
        struct plan plan = { .joins_mappings = engine && engine->unpopulated };
        enum nebula_status status;

        plan.parts = malloc((count ? count : 1) * sizeof *plan.parts);
        plan.direct = malloc((count ? count : 1) * 2 * sizeof *plan.direct);
        if (!plan.parts || !plan.direct) {
                status = error_set(error, NEBULA_NO_MEMORY, 0, "no memory to plan a capture of %zu parts", count);
                goto free;
        }
        if (engine) {
                candidates_find(&plan, parts, count);
                spans_find(&plan);
        } else {
                memcpy(plan.direct, parts, count * sizeof *parts);
                plan.direct_count = count;
        }
        status = capture_make(&plan, count, ret_capture, error);
free:
        free(plan.direct);
        free(plan.parts);
        free(plan.spans);
        return status;
}

size_t cow_chunk_find(const struct cow_capture *capture, uint64_t block)
{
        size_t low = 0, high = capture->chunk_count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (capture->chunks[middle].block < block)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

size_t cow_part_find(const struct cow_capture *capture, uint64_t address)
{
        size_t low = 0, high = capture->part_count;

        while (low < high) {
                size_t middle = low + (high - low) / 2;

                if (capture->parts[middle].reach <= address)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}
