#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#include "sum/cpu.h"
#include "sum/sum.h"
#include "sum/sum_private.h"
#include "tap.h"

#define BIG (1u << 16)

static uint8_t bytes[BIG + 64];

static void fill(void)
{
        uint32_t state = 12345;

        for (size_t k = 0; k < sizeof bytes; k++) {
                state = state * 1664525 + 1013904223;
                bytes[k] = (uint8_t)(state >> 24);
        }
}

/* One bit at a time, as the standards define it. */
static uint64_t slow_crc(uint64_t crc, uint64_t polynomial, uint64_t mask, const uint8_t *data, size_t size)
{
        crc ^= mask;
        while (size--) {
                crc ^= *data++;
                for (int bit = 0; bit < 8; bit++)
                        crc = (crc >> 1) ^ ((crc & 1) ? polynomial : 0);
        }
        return crc ^ mask;
}

static uint32_t slow_crc32(uint32_t crc, const uint8_t *data, size_t size)
{
        return (uint32_t)slow_crc(crc, SUM_POLY32, UINT32_MAX, data, size);
}

static uint64_t slow_crc64(uint64_t crc, const uint8_t *data, size_t size)
{
        return slow_crc(crc, SUM_POLY64, UINT64_MAX, data, size);
}

/* Runs `test` with each instruction set of this machine, and leaves the best one in use. */
static void each_isa(void (*test)(void))
{
        enum sum_isa best = sum_isa_used();

        for (int isa = SUM_ISA_PORTABLE; isa < SUM_ISA_COUNT; isa++) {
                if (sum_isa_force((enum sum_isa)isa)) {
                        printf("# this machine lacks instruction set %d\n", isa);
                        continue;
                }
                CHECK(sum_isa_used() == (enum sum_isa)isa);
                test();
        }
        CHECK(sum_isa_force(best) == 0);
}

static void check_vectors(void)
{
        CHECK(sum_crc32(0, "123456789", 9) == 0xcbf43926);
        CHECK(sum_crc64(0, "123456789", 9) == 0xae8b14860a799888);
        CHECK(sum_crc32(0, NULL, 0) == 0);
        CHECK(sum_crc64(0, NULL, 0) == 0);
        CHECK(sum_crc32(7, NULL, 0) == 7);
}

static void published_check_values_come_out_on_every_path(void)
{
        each_isa(check_vectors);
}

static void check_sizes(void)
{
        /* Every remainder of the block sizes, and every alignment against a cache line. */
        for (size_t size = 0; size < 1200; size++) {
                const uint8_t *data = bytes + size % 64;
                uint32_t start32 = (uint32_t)size * 0x9e3779b9u, crc32 = start32;
                uint64_t start64 = size * 0x9e3779b97f4a7c15u, crc64 = start64;

                sum_both(data, size, &crc32, &crc64);
                CHECK(crc32 == slow_crc32(start32, data, size));
                CHECK(crc64 == slow_crc64(start64, data, size));
                CHECK(sum_crc32(start32, data, size) == crc32);
                CHECK(sum_crc64(start64, data, size) == crc64);
        }
}

static void every_size_and_alignment_equals_the_definition(void)
{
        fill();
        each_isa(check_sizes);
}

static void check_pieces(void)
{
        static const size_t cuts[] = { 0, 1, 15, 64, 511, 512, 4096, 40000, BIG };
        uint32_t whole32 = slow_crc32(0, bytes, BIG);
        uint64_t whole64 = slow_crc64(0, bytes, BIG);

        for (size_t k = 0; k < sizeof cuts / sizeof cuts[0]; k++) {
                size_t cut = cuts[k], rest = BIG - cut;

                CHECK(sum_crc32(sum_crc32(0, bytes, cut), bytes + cut, rest) == whole32);
                CHECK(sum_crc64(sum_crc64(0, bytes, cut), bytes + cut, rest) == whole64);
                CHECK(sum_crc32_combine(sum_crc32(0, bytes, cut), sum_crc32(0, bytes + cut, rest), rest) == whole32);
                CHECK(sum_crc64_combine(sum_crc64(0, bytes, cut), sum_crc64(0, bytes + cut, rest), rest) == whole64);
        }
}

static void pieces_continue_and_combine_to_the_whole(void)
{
        fill();
        each_isa(check_pieces);
}

static void combining_with_huge_sizes_does_not_overflow(void)
{
        /* n zero bytes twice are 2n zero bytes, also where 8n does not fit 64 bits. */
        uint64_t huge = UINT64_C(1) << 62;

        CHECK(sum_crc64_combine(sum_crc64_combine(5, 0, huge), 0, huge) == sum_crc64_combine(5, 0, huge * 2));
        CHECK(sum_crc32_combine(sum_crc32_combine(5, 0, huge), 0, huge) == sum_crc32_combine(5, 0, huge * 2));
}

typedef void copy_function(void *to, const void *from, size_t size);

static void check_copy(copy_function *copy)
{
        static const size_t sizes[] = { 0, 1, 63, 64, 4096, 32767, 32768, 32769, 40001, BIG };
        static uint8_t to[BIG + 256];

        for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
                for (size_t shift = 0; shift < 64; shift += 7) {
                        size_t size = sizes[k];

                        memset(to, 0xee, sizeof to);
                        copy(to + 64 + shift, bytes + (63 - shift), size);
                        CHECK(memcmp(to + 64 + shift, bytes + (63 - shift), size) == 0);
                        CHECK(to[63 + shift] == 0xee && to[64 + shift + size] == 0xee);
                }
        }
}

static void check_dispatched_copy(void)
{
        check_copy(sum_copy_stream);
}

static void copies_are_exact_and_stay_inside(void)
{
        fill();
        each_isa(check_dispatched_copy);
#ifdef SUM_X86
        check_copy(sum_copy_sse2);
        if (__builtin_cpu_supports("avx2"))
                check_copy(sum_copy_avx2);
#endif
}

/* Compares the sums that a copy has computed with those of the bytes that it wrote. */
static void copy_and_sum(void *to, const void *from, size_t size)
{
        uint32_t crc32 = 0x12345678, expected32 = crc32;
        uint64_t crc64 = UINT64_C(0x123456789abcdef0), expected64 = crc64;

        sum_copy_both(to, from, size, &crc32, &crc64);
        sum_both(from, size, &expected32, &expected64);
        CHECK(crc32 == expected32 && crc64 == expected64);
}

static void check_copy_and_sum(void)
{
        static uint8_t to[BIG + 64];

        check_copy(copy_and_sum);
        for (size_t size = 8100; size < 8100 + 700; size++) /* every remainder of the steps of a streaming copy */
                copy_and_sum(to + size % 64, bytes + size % 61, size);
}

static void copies_that_sum_are_exact_too_and_sum_right(void)
{
        fill();
        each_isa(check_copy_and_sum);
}

static atomic_bool changes_end;

/* The race in this function is intended: the test is about it. */
#if defined(__SANITIZE_THREAD__) || defined(__clang__)
__attribute__((no_sanitize("thread")))
#endif
static void *change_bytes(void *argument)
{
        for (uint32_t turn = 1; !atomic_load(&changes_end); turn++)
                for (size_t at = turn % 61; at < BIG; at += 61)
                        ((volatile uint8_t *)bytes)[at] = (uint8_t)(turn + at);
        return argument;
}

/* A file must not count as damaged if the program changed the memory during the save. */
static void check_sums_under_changes(void)
{
        static uint8_t to[BIG + 64];
        pthread_t thread;

        if (!sum_copies_both()) /* else it copies with memcpy, which a sanitizer watches */
                return;
        atomic_store(&changes_end, false);
        if (pthread_create(&thread, NULL, change_bytes, NULL))
                abort();
        for (size_t round = 0; round < 2000; round++) {
                uint32_t crc32 = 0, expected32 = 0;
                uint64_t crc64 = 0, expected64 = 0;
                uint8_t *at = to + round % 64;
                size_t size = BIG - round % 300;

                sum_copy_both(at, bytes, size, &crc32, &crc64);
                sum_both(at, size, &expected32, &expected64);
                CHECK(crc32 == expected32 && crc64 == expected64);
        }
        atomic_store(&changes_end, true);
        pthread_join(thread, NULL);
}

static void sums_are_of_the_copied_bytes_even_if_the_source_changes(void)
{
        fill();
        each_isa(check_sums_under_changes);
}

static void an_unknown_instruction_set_is_refused(void)
{
        enum sum_isa used = sum_isa_used();

        CHECK(sum_isa_force((enum sum_isa)99) == -1);
        CHECK(sum_isa_used() == used);
}

static void check_crc32c(void)
{
        CHECK(sum_crc32c(0, "123456789", 9) == 0xe3069283 && sum_crc32c(0, "", 0) == 0);
        for (size_t size = 0; size < 70; size++) {
                size_t first = size / 3;

                CHECK(sum_crc32c(0, bytes + size % 7, size) == (uint32_t)slow_crc(0, 0x82f63b78, UINT32_MAX, bytes + size % 7, size));
                CHECK(sum_crc32c(sum_crc32c(0, bytes, first), bytes + first, size - first) == sum_crc32c(0, bytes, size));
        }
}

static void crc32c_is_that_of_the_standard(void)
{
        fill();
        each_isa(check_crc32c);
}

static void the_processor_has_what_the_compiler_says(void)
{
#ifdef __x86_64__
        __builtin_cpu_init();
        CHECK(cpu_has(CPU_PCLMUL) == !!__builtin_cpu_supports("pclmul"));
        CHECK(cpu_has(CPU_SSE4_1) == !!__builtin_cpu_supports("sse4.1"));
        CHECK(cpu_has(CPU_SSE4_2) == !!__builtin_cpu_supports("sse4.2"));
        CHECK(cpu_has(CPU_AVX2) == !!__builtin_cpu_supports("avx2"));
        CHECK(cpu_has(CPU_VPCLMULQDQ) == !!__builtin_cpu_supports("vpclmulqdq"));
        CHECK(cpu_has(CPU_AVX512F) == !!__builtin_cpu_supports("avx512f"));
        CHECK(cpu_has(CPU_AVX512VL) == !!__builtin_cpu_supports("avx512vl"));
#endif
        CHECK(cpu_has(0));
}

TAP_MAIN(TEST(the_processor_has_what_the_compiler_says), TEST(crc32c_is_that_of_the_standard), TEST(published_check_values_come_out_on_every_path), TEST(every_size_and_alignment_equals_the_definition),
         TEST(pieces_continue_and_combine_to_the_whole), TEST(combining_with_huge_sizes_does_not_overflow),
         TEST(copies_are_exact_and_stay_inside), TEST(copies_that_sum_are_exact_too_and_sum_right),
         TEST(sums_are_of_the_copied_bytes_even_if_the_source_changes), TEST(an_unknown_instruction_set_is_refused))
