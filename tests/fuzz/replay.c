/*
 * replay.c - replaces libFuzzer if the compiler has none.
 *
 * replay CORPUS_DIRECTORY [RUNS]: gives every file of the directory to LLVMFuzzerTestOneInput, then RUNS mutations of them. The
 * mutations depend only on the files' names and bytes, so the next run repeats a failure. Its input is written to crash-replay
 * before a signal ends the process.
 */
#include <dirent.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define INPUT_MAX (1u << 20)
#define FILES_MAX 512

struct input {
        char *name;
        uint8_t *data;
        size_t size;
};

static uint64_t random_state = 88172645463325252u;
static const uint8_t *volatile running_data;
static volatile size_t running_size;

static uint64_t random_next(void)
{
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        return random_state;
}

static size_t random_below(size_t limit)
{
        return limit ? (size_t)(random_next() % limit) : 0;
}

static void keep_crash(int number)
{
        FILE *file = fopen("crash-replay", "wb");

        if (file) {
                fwrite(running_data, 1, running_size, file);
                fclose(file);
        }
        signal(number, SIG_DFL);
        raise(number);
}

/* In memory of exactly that size, so that a sanitizer sees a read past its end. */
static void run_one(const uint8_t *data, size_t size)
{
        uint8_t *copy = malloc(size ? size : 1);

        if (!copy)
                abort();
        memcpy(copy, data, size);
        running_data = copy;
        running_size = size;
        LLVMFuzzerTestOneInput(copy, size);
        free(copy);
}

static size_t mutate_once(uint8_t *data, size_t size)
{
        static const uint64_t edges[] = { 0, 1, 0x7f, 0x80, 0xff, 0xfffe, 0xffff, 0x7fffffff, 0xffffffff, 0x100000000,
                                          INT64_MAX, UINT64_MAX, UINT64_MAX - 63 };
        size_t at = random_below(size), length, from;
        uint64_t value;

        switch (random_below(7)) {
        case 0:
                if (size)
                        data[at] ^= (uint8_t)(1u << random_below(8));
                return size;
        case 1:
                if (size)
                        data[at] = (uint8_t)random_next();
                return size;
        case 2: /* an integer at an edge, of 1, 2, 4 or 8 bytes */
                length = (size_t)1 << random_below(4);
                value = edges[random_below(sizeof edges / sizeof edges[0])];
                if (size >= length)
                        memcpy(data + random_below(size - length + 1), &value, length);
                return size;
        case 3: /* a little more or less than what stands there */
                if (size)
                        data[at] = (uint8_t)(data[at] + random_below(9) - 4);
                return size;
        case 4:
                return random_below(size + 1);
        case 5: /* one part over another */
                length = random_below(size < 64 ? size : 64);
                from = random_below(size - length);
                at = random_below(size - length);
                memmove(data + at, data + from, length);
                return size;
        default: /* cut a part out */
                length = random_below(size < 64 ? size : 64);
                at = random_below(size - length);
                memmove(data + at, data + at + length, size - length - at);
                return size - length;
        }
}

static int by_name(const void *a, const void *b)
{
        return strcmp(((const struct input *)a)->name, ((const struct input *)b)->name);
}

static size_t read_corpus(const char *directory, struct input *inputs)
{
        DIR *dir = opendir(directory);
        struct dirent *entry;
        size_t count = 0;

        if (!dir || chdir(directory)) {
                perror(directory);
                exit(1);
        }
        while ((entry = readdir(dir)) && count < FILES_MAX) {
                struct input *input = &inputs[count];
                FILE *file;

                if (entry->d_name[0] == '.')
                        continue;
                file = fopen(entry->d_name, "rb");
                input->name = strdup(entry->d_name);
                input->data = malloc(INPUT_MAX);
                if (!file || !input->name || !input->data) {
                        perror(entry->d_name);
                        exit(1);
                }
                input->size = fread(input->data, 1, INPUT_MAX, file);
                fclose(file);
                count++;
        }
        closedir(dir);
        qsort(inputs, count, sizeof *inputs, by_name); /* directories list in any order */
        return count;
}

int main(int argc, char **argv)
{
        static struct input inputs[FILES_MAX];
        static const int numbers[] = { SIGSEGV, SIGBUS, SIGABRT, SIGFPE, SIGILL };
        size_t runs = argc > 2 ? strtoul(argv[2], NULL, 10) : 8000, count;
        uint8_t *scratch = malloc(INPUT_MAX);
        char home[4096];

        if (argc < 2 || !scratch || !getcwd(home, sizeof home))
                return 1;
        count = read_corpus(argv[1], inputs);
        if (chdir(home))
                return 1;
        if (count == 0) {
                fprintf(stderr, "%s: the corpus is empty\n", argv[1]);
                return 1;
        }
        for (size_t k = 0; k < sizeof numbers / sizeof numbers[0]; k++)
                signal(numbers[k], keep_crash);
        run_one(scratch, 0);
        for (size_t k = 0; k < count; k++)
                run_one(inputs[k].data, inputs[k].size);
        for (size_t k = 0; k < runs; k++) {
                const struct input *input = &inputs[k % count];
                size_t size = input->size, steps = 1 + random_below(8);

                memcpy(scratch, input->data, size);
                while (steps--)
                        size = mutate_once(scratch, size);
                run_one(scratch, size);
        }
        printf("%zu files, %zu mutations\n", count, runs);
        for (size_t k = 0; k < count; k++) {
                free(inputs[k].name);
                free(inputs[k].data);
        }
        free(scratch);
        return 0;
}
