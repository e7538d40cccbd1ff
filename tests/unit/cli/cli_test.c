#include <errno.h>

#include "cli/args.h"
#include "cli/doctor.h"
#include "cli/human.h"
#include "cli/output_file.h"
#include "cli/table.h"
#include "tap.h"
#include "test_dir.h"

struct options {
        bool json, yes;
        const char *path;
        uint64_t number;
};

static bool parse(struct options *options, struct args *args, int argc, char **argv)
{
        const struct args_option table[] = {
                { "json", ARGS_FLAG, &options->json }, { "yes", ARGS_FLAG, &options->yes },
                { "path", ARGS_TEXT, &options->path }, { "keep-last", ARGS_NUMBER, &options->number },
                { "timeout", ARGS_NUMBER, &options->number, ARGS_SECONDS_MAX },
        };

        *options = (struct options){ 0 };
        return args_parse(argc, argv, table, sizeof table / sizeof *table, args);
}
#define PARSE(...) parse(&options, &args, (int)(sizeof((char *[]){ __VA_ARGS__ }) / sizeof(char *)), (char *[]){ __VA_ARGS__ })

static void options_and_positionals_come_in_any_order(void)
{
        struct options options;
        struct args args;

        REQUIRE(PARSE("x", "tag", "--path", "/a", "--json", "name", "--keep-last=12"));
        CHECK(args.count == 2 && !strcmp(args.positionals[0], "tag") && !strcmp(args.positionals[1], "name"));
        CHECK(options.json && !options.yes && !strcmp(options.path, "/a") && options.number == 12);
        REQUIRE(PARSE("x", "--", "--json", "-"));
        CHECK(args.count == 2 && !options.json);
        REQUIRE(PARSE("x", "-"));
        CHECK(args.count == 1);
}

static void a_wrong_command_line_is_refused_and_says_what_is_wrong(void)
{
        struct options options;
        struct args args;

        CHECK(!PARSE("x", "--jsno") && strstr(args.problem, "--jsno"));
        CHECK(!PARSE("x", "-j") && strstr(args.problem, "-j"));
        CHECK(!PARSE("x", "--path") && strstr(args.problem, "needs a value"));
        CHECK(!PARSE("x", "--path=") && strstr(args.problem, "needs a value"));
        CHECK(!PARSE("x", "--json=1") && strstr(args.problem, "takes no value"));
        CHECK(!PARSE("x", "--keep-last", "0") && strstr(args.problem, "number"));
        CHECK(!PARSE("x", "--keep-last", "-3") && strstr(args.problem, "number"));
        CHECK(!PARSE("x", "--keep-last", "3x"));
        CHECK(!PARSE("x", "--keep-last", "99999999999999999999"));
        CHECK(PARSE("x", "--timeout", "31536000") && options.number == ARGS_SECONDS_MAX);
        CHECK(!PARSE("x", "--timeout", "31536001") && strstr(args.problem, "--timeout takes a whole number from 1 to 31536000"));
}

static void too_many_arguments_are_refused(void)
{
        char *argv[ARGS_POSITIONAL_MAX + 2];
        struct options options;
        struct args args;

        for (size_t i = 0; i < ARGS_POSITIONAL_MAX + 2; i++)
                argv[i] = "a";
        CHECK(parse(&options, &args, ARGS_POSITIONAL_MAX + 1, argv));
        CHECK(!parse(&options, &args, ARGS_POSITIONAL_MAX + 2, argv));
}

static void help_is_seen_before_the_double_dash_only(void)
{
        CHECK(args_want_help(3, (char *[]){ "x", "tag", "--help" }));
        CHECK(args_want_help(2, (char *[]){ "x", "-h" }));
        CHECK(!args_want_help(3, (char *[]){ "x", "--", "--help" }));
        CHECK(!args_want_help(1, (char *[]){ "-h" }));
}

#define READS(call, expected) CHECK(!strcmp(call, expected))

static void sizes_read_well_at_every_border(void)
{
        char text[HUMAN_MAX];

        READS(human_size(0, text), "0 B");
        READS(human_size(1023, text), "1023 B");
        READS(human_size(1024, text), "1.0 KiB");
        READS(human_size((1u << 20) - 1, text), "1.0 MiB");
        READS(human_size(UINT64_C(1) << 30, text), "1.0 GiB");
        READS(human_size(UINT64_C(1610612736), text), "1.5 GiB");
        READS(human_size(UINT64_MAX, text), "16.0 EiB");
        READS(human_speed(UINT64_C(1) << 31, 2, text), "1.0 GiB/s");
        READS(human_speed(5, 0, text), "-");
}

static void durations_and_ages_read_well(void)
{
        char text[HUMAN_MAX];

        READS(human_duration(0.0123, text), "12.3 ms");
        READS(human_duration(3.21, text), "3.2 s");
        READS(human_duration(41, text), "41 s");
        READS(human_duration(600, text), "10 min");
        READS(human_duration(7500, text), "2 h 5 min");
        READS(human_age(100, 101, text), "just now");
        READS(human_age(100, 145, text), "45 s ago");
        READS(human_age(1000, 1180, text), "3 min ago");
        READS(human_age(1000, 1000 + 3 * 3600, text), "3 h ago");
        READS(human_age(1000, 1000 + 5 * 86400, text), "5 days ago");
        READS(human_age(0, 5, text), "-");
        READS(human_age(500, 5, text), "in the future");
}

/* What table_print writes, in memory. */
static char *printed(const struct table *table, uint32_t width, bool has_colour)
{
        char *text = NULL;
        size_t size;
        FILE *file = open_memstream(&text, &size);

        table_print(table, file, width, has_colour);
        fclose(file);
        return text;
}

static const struct table_column columns[] = {
        { "TAG", TABLE_LEFT, true }, { "SIZE", TABLE_RIGHT, false }, { "WHERE", TABLE_LEFT, false },
};

static void columns_are_aligned_and_lines_have_no_blanks_at_their_end(void)
{
        struct table *table = table_new(columns, 3);
        char *text;

        table_cell(table, STYLE_PLAIN, "step1");
        table_cell(table, STYLE_PLAIN, "%d MiB", 7);
        table_cell(table, STYLE_GOOD, "memory");
        table_cell(table, STYLE_PLAIN, "gr\xc3\xb6\xc3\x9f" "e");
        table_cell(table, STYLE_PLAIN, "1000 MiB");
        table_cell(table, STYLE_PLAIN, "%s", "");
        text = printed(table, 0, false);
        CHECK(!strcmp(text, "TAG        SIZE  WHERE\n"
                            "step1     7 MiB  memory\n"
                            "gr\xc3\xb6\xc3\x9f" "e  1000 MiB\n"));
        free(text);
        table_free(table);
}

static void colours_appear_only_when_asked_for_and_do_not_move_columns(void)
{
        struct table *table = table_new(columns, 3);
        char *plain, *coloured;

        for (int i = 0; i < 3; i++)
                table_cell(table, STYLE_BAD, "x");
        plain = printed(table, 0, false);
        coloured = printed(table, 0, true);
        CHECK(!strchr(plain, '\033') && strstr(coloured, "\033[31mx\033[0m"));
        CHECK(strstr(plain, "x       x  x\n") != NULL);
        free(plain);
        free(coloured);
        table_free(table);
}

static void a_narrow_terminal_shortens_the_middle_of_what_may_shrink(void)
{
        struct table *table = table_new(columns, 3);
        char *text;

        table_cell(table, STYLE_PLAIN, "a_very_long_tag_name_of_some_framework_step500");
        table_cell(table, STYLE_PLAIN, "1 MiB");
        table_cell(table, STYLE_PLAIN, "storage");
        text = printed(table, 40, false);
        for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
                *end = '\0';
                CHECK(table_text_width(line) <= 40);
        }
        free(text);
        text = printed(table, 40, false);
        CHECK(strstr(text, "a_very_long") && strstr(text, "\xe2\x80\xa6") && strstr(text, "step500  1 MiB  storage\n"));
        free(text);
        text = printed(table, 0, false);
        CHECK(strstr(text, "a_very_long_tag_name_of_some_framework_step500"));
        free(text);
        table_free(table);
}

static void a_tag_cannot_send_control_bytes_to_the_terminal(void)
{
        struct table *table = table_new(columns, 3);
        char *text;

        table_cell(table, STYLE_PLAIN, "bad\033[2Jtag\n");
        table_cell(table, STYLE_PLAIN, "1");
        table_cell(table, STYLE_PLAIN, "x");
        text = printed(table, 0, false);
        CHECK(!strchr(text, '\033') && strstr(text, "bad?[2Jtag?"));
        free(text);
        table_free(table);
}

/* Two processes in containers with the same pid share the directory. */
static void files_that_are_restored_beside_each_other_do_not_mix(void)
{
        struct nebula_error error;
        struct output_file first, second;
        char directory[256], path[300], *text;
        size_t size;

        test_dir_make(directory);
        snprintf(path, sizeof path, "%s/a", directory);
        REQUIRE(!output_file_begin(&first, directory, "a", 4, &error));
        output_file_write(&first, "aaaa", 0, 4);
        REQUIRE(!output_file_begin(&second, directory, "b", 4, &error));
        output_file_write(&second, "bb", 0, 2);
        CHECK(!output_file_sync(&first, &error) && !output_file_place(&first, false, &error));
        REQUIRE(!os_read_file(path, 100, &text, &size));
        CHECK(size == 4 && !memcmp(text, "aaaa", 4));
        free(text);
        output_file_write(&second, "bb", 2, 2);
        CHECK(!output_file_sync(&second, &error) && !output_file_place(&second, false, &error));
        test_dir_remove(directory);
}

static void a_name_that_was_taken_meanwhile_is_replaced_only_on_request(void)
{
        struct nebula_error error = { 0 };
        char directory[256], path[300], *text = NULL;
        struct output_file output;
        size_t size = 0;

        test_dir_make(directory);
        snprintf(path, sizeof path, "%s/a", directory);
        for (int replaces = 0; replaces < 2; replaces++) {
                REQUIRE(!output_file_begin(&output, directory, "a", 3, &error));
                output_file_write(&output, "new", 0, 3);
                REQUIRE(!os_write_file_atomic(path, "other", 5));
                CHECK(!output_file_sync(&output, &error) && output_file_place(&output, replaces, &error) == (replaces ? NEBULA_OK : NEBULA_BUSY));
                REQUIRE(!os_read_file(path, 100, &text, &size));
                CHECK(size == (replaces ? 3u : 5u));
                free(text);
                CHECK(os->stat(output.temporary, false, &(struct os_stat){ 0 }) == -ENOENT);
        }
        test_dir_remove(directory);
}

/* What doctor_health.c takes from other checks. */
bool doctor_memory(const char *path, struct doctor_finding *finding)
{
        (void)path;
        (void)finding;
        return false;
}

int doctor_try_write(const char *path, int flags, double *ret_seconds)
{
        (void)path;
        (void)flags;
        (void)ret_seconds;
        return -ENOSYS;
}

static void put(const char *directory, const char *name, const void *data, size_t size)
{
        char path[512];

        snprintf(path, sizeof path, "%s/%s", directory, name);
        *strrchr(path, '/') = '\0';
        if (os_make_dirs(path, 0700))
                abort();
        path[strlen(path)] = '/';
        if (os_write_file_atomic(path, data, size))
                abort();
}

static void a_device_that_has_left_the_bus_and_memory_errors_are_found(void)
{
        unsigned char gone[64], here[64] = { 0xde, 0x10 }, virtual[64] = { 0xff, 0xff, 0xff, 0xff, 6 };
        struct doctor_finding finding = { 0 };
        char sysfs[256];

        memset(gone, 0xff, sizeof gone);
        test_dir_make(sysfs);
        put(sysfs, "bus/pci/devices/0000:01:00.0/class", "0x030200\n", 9);
        put(sysfs, "bus/pci/devices/0000:01:00.0/config", here, sizeof here);
        put(sysfs, "bus/pci/devices/0000:02:00.1/class", "0x020000\n", 9);
        put(sysfs, "bus/pci/devices/0000:02:00.1/config", virtual, sizeof virtual);
        put(sysfs, "bus/pci/devices/0000:03:00.0/class", "0x060400\n", 9); /* a bridge */
        put(sysfs, "bus/pci/devices/0000:03:00.0/config", gone, sizeof gone);
        put(sysfs, "devices/system/edac/mc/mc0/ue_count", "0\n", 2);
        doctor_devices(sysfs, &finding);
        CHECK(finding.verdict == DOCTOR_GOOD && strstr(finding.found, "3 on the PCI bus"));
        put(sysfs, "devices/system/edac/mc/mc1/ue_count", "2\n", 2);
        doctor_devices(sysfs, &finding);
        CHECK(finding.verdict == DOCTOR_SLOWER && strstr(finding.found, "2 memory errors"));
        put(sysfs, "bus/pci/devices/0000:01:00.0/config", gone, sizeof gone);
        doctor_devices(sysfs, &finding);
        CHECK(finding.verdict == DOCTOR_BAD && strstr(finding.found, " 0000:01:00.0") && !strstr(finding.found, "0000:03"));
        finding = (struct doctor_finding){ 0 };
        doctor_devices("/nowhere", &finding);
        CHECK(finding.verdict == DOCTOR_GOOD);
        test_dir_remove(sysfs);
}

TAP_MAIN(TEST(options_and_positionals_come_in_any_order),
         TEST(a_wrong_command_line_is_refused_and_says_what_is_wrong),
         TEST(too_many_arguments_are_refused),
         TEST(help_is_seen_before_the_double_dash_only),
         TEST(sizes_read_well_at_every_border),
         TEST(durations_and_ages_read_well),
         TEST(columns_are_aligned_and_lines_have_no_blanks_at_their_end),
         TEST(colours_appear_only_when_asked_for_and_do_not_move_columns),
         TEST(a_narrow_terminal_shortens_the_middle_of_what_may_shrink),
         TEST(a_tag_cannot_send_control_bytes_to_the_terminal),
         TEST(files_that_are_restored_beside_each_other_do_not_mix),
         TEST(a_name_that_was_taken_meanwhile_is_replaced_only_on_request),
         TEST(a_device_that_has_left_the_bus_and_memory_errors_are_found))
