/* See verify_report.h. */
#include <stdio.h>
#include <stdlib.h>

#include "cli/check.h"
#include "cli/cli.h"
#include "cli/human.h"
#include "cli/table.h"
#include "cli/verify_report.h"
#include "cli/vouch.h"
#include "os/os.h"

static void print_sample(const json_t *sample)
{
        double never = json_number_value(json_object_get(sample, "never_verified_count")), oldest = json_number_value(json_object_get(sample, "oldest_at"));
        char age[HUMAN_MAX], size[HUMAN_MAX];

        printf("%.0f checkpoints, %s: ", json_number_value(json_object_get(sample, "version_count")),
               human_size((uint64_t)json_number_value(json_object_get(sample, "bytes")), size));
        if (never > 0)
                printf("%.0f never verified; the next sample goes on with them\n", never);
        else
                printf("all were verified; the oldest check was %s\n", human_age(oldest, (double)os->wall_ns() / 1e9, age));
}

/* Prints one line per file, and each damage below it. */
static void print_file(const json_t *file, struct table *table)
{
        const json_t *damages = json_object_get(file, "damage");
        const char *repaired = json_string_value(json_object_get(file, "repaired"));
        char size[HUMAN_MAX];

        table_cell(table, check_ok(file) ? STYLE_GOOD : STYLE_BAD, "  %s", check_ok(file) ? "ok" : "DAMAGED");
        table_cell(table, STYLE_PLAIN, "%s", json_string_value(json_object_get(file, "name")));
        table_cell(table, STYLE_PLAIN, "%s", human_size((uint64_t)json_integer_value(json_object_get(file, "size")), size));
        table_cell(table, STYLE_PLAIN, "%s%s", json_array_size(damages) ? "see below" : repaired ? "it was damaged; its bytes are from " : "", repaired ? repaired : "");
}

static void print_damage(const json_t *file)
{
        const json_t *damages = json_object_get(file, "damage"), *same = json_object_get(file, "same_in");

        for (size_t i = 0; i < json_array_size(damages); i++) {
                const json_t *one = json_array_get(damages, i), *records = json_object_get(one, "record_names");

                printf("  ");
                term_print(STYLE_BAD, "%s", json_string_value(json_object_get(file, "name")));
                printf(" at byte %" JSON_INTEGER_FORMAT ", %" JSON_INTEGER_FORMAT " bytes",
                       json_integer_value(json_object_get(one, "offset")), json_integer_value(json_object_get(one, "size")));
                for (size_t r = 0; r < json_array_size(records); r++)
                        term_print(STYLE_PLAIN, "%s%s", r ? ", " : ", in ", json_string_value(json_array_get(records, r)));
                term_print(STYLE_PLAIN, "\n    %s\n", json_string_value(json_object_get(one, "message")));
        }
        for (size_t i = 0; i < json_array_size(same); i++)
                printf("%s%s", i ? ", " : "    other versions have the same bytes there, and can share them: ", json_string_value(json_array_get(same, i)));
        if (json_array_size(same))
                printf("\n");
}

void verify_print_version(const json_t *version)
{
        static const struct table_column columns[] = {
                { NULL, TABLE_LEFT, false }, { NULL, TABLE_LEFT, true }, { NULL, TABLE_RIGHT, false }, { NULL, TABLE_LEFT, false },
        };
        const json_t *lists[] = { json_object_get(version, "documents"), json_object_get(version, "files") };
        struct table *table = table_new(columns, CLI_COUNT(columns));

        char *signed_by = vouch_text(json_object_get(version, "signatures"));

        term_print(STYLE_BOLD, "%s\n", json_string_value(json_object_get(version, "tag")));
        if (signed_by)
                term_print(STYLE_PLAIN, "  %s\n", signed_by);
        free(signed_by);
        for (size_t l = 0; l < CLI_COUNT(lists); l++)
                for (size_t i = 0; i < json_array_size(lists[l]); i++)
                        if (l == 1 || !check_ok(json_array_get(lists[l], i)) || json_object_get(json_array_get(lists[l], i), "repaired"))
                                print_file(json_array_get(lists[l], i), table);
        table_print(table, stdout, term_columns(), term_has_colour());
        table_free(table);
        for (size_t l = 0; l < CLI_COUNT(lists); l++)
                for (size_t i = 0; i < json_array_size(lists[l]); i++)
                        print_damage(json_array_get(lists[l], i));
}

struct verify_sum {
        uint64_t bytes;
        size_t files, bad;
};

static struct verify_sum sum_up(const json_t *versions)
{
        struct verify_sum sum = { 0 };

        for (size_t v = 0; v < json_array_size(versions); v++) {
                const json_t *version = json_array_get(versions, v);
                const json_t *files = json_object_get(version, "files"), *documents = json_object_get(version, "documents");

                for (size_t i = 0; i < json_array_size(files); i++) {
                        sum.bytes += (uint64_t)json_integer_value(json_object_get(json_array_get(files, i), "size"));
                        sum.bad += !check_ok(json_array_get(files, i));
                        sum.files++;
                }
                for (size_t i = 0; i < json_array_size(documents); i++)
                        sum.bad += !check_ok(json_array_get(documents, i));
        }
        return sum;
}

int verify_print(bool json, json_t *versions, const json_t *sample, size_t passed_over, double seconds)
{
        struct verify_sum sum = sum_up(versions);
        char size[HUMAN_MAX], speed[HUMAN_MAX], duration[HUMAN_MAX];
        bool ok = !sum.bad && !passed_over;
        int code = ok ? CLI_OK : CLI_WRONG;

        if (json)
                return cli_print_json(json_pack("{s:b, s:I, s:I, s:f, s:O, s:O?}", "ok", ok, "bytes", (json_int_t)sum.bytes,
                                                "file_count", (json_int_t)sum.files, "seconds", seconds, "versions", versions, "sample", sample),
                                      code);
        for (size_t v = 0; v < json_array_size(versions); v++)
                verify_print_version(json_array_get(versions, v));
        printf("%s in %zu file%s, %s, %s: ", human_size(sum.bytes, size), sum.files, sum.files == 1 ? "" : "s",
               human_duration(seconds, duration), human_speed(sum.bytes, seconds, speed));
        if (sum.bad)
                term_print(STYLE_BAD, "%zu damaged\n", sum.bad);
        else if (passed_over)
                term_print(STYLE_BAD, "no damage here, but %zu checkpoint(s) could not be read\n", passed_over);
        else
                term_print(STYLE_GOOD, "no damage\n");
        if (sample)
                print_sample(sample);
        return code;
}
