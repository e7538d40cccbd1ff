/*
 * sum_private.h - for the files of src/sum only.
 *
 * In this folder a CRC is "raw": the register itself, without the complement at
 * both ends of the finished form. sum.c adds the complement.
 *
 * Both polynomials are reflected: bit 0 of a register is the coefficient of the
 * highest power. A W-bit register r stands for the sum of bit(i) * x^(W-1-i).
 */
#ifndef NB_SUM_SUM_PRIVATE_H
#define NB_SUM_SUM_PRIVATE_H

#include "sum/sum.h"

/* Streaming stores gain nothing on a shorter copy: its end waits for all of them. */
#define SUM_STREAM_MIN (8u << 10)

#define SUM_POLY32 UINT32_C(0xedb88320)
#define SUM_POLY64 UINT64_C(0x9a6c9329ac4bc9b5)

/* The functions of one instruction set. Any alignment, any size. */
struct sum_ops {
        uint32_t (*crc32)(uint32_t raw, const uint8_t *data, size_t size);
        uint64_t (*crc64)(uint64_t raw, const uint8_t *data, size_t size);
        void (*both)(const uint8_t *data, size_t size, uint32_t *raw32, uint64_t *raw64);
        void (*copy_stream)(void *to, const void *from, size_t size);
        /* copy_stream and both sums in one pass, for at least SUM_STREAM_MIN bytes. NULL if that would take much longer than the copy. */
        void (*copy_both)(uint8_t *to, const uint8_t *from, size_t size, uint32_t *raw32, uint64_t *raw64);
        bool is_unnoticed; /* copy_both is about as fast as copy_stream */
};

extern const struct sum_ops sum_portable; /* crc_portable.c */

/* The constants that move a 128-bit lane forward over some bytes (fold.c). */
struct sum_fold {
        uint64_t low;  /* for the first 8 bytes of the lane */
        uint64_t high; /* for the last 8 bytes */
};
/* Indices of the distances that the carry-less files use. */
enum sum_distance { SUM_FOLD_16, SUM_FOLD_32, SUM_FOLD_64, SUM_FOLD_128, SUM_FOLD_256, SUM_DISTANCE_COUNT };
extern struct sum_fold sum_folds32[SUM_DISTANCE_COUNT], sum_folds64[SUM_DISTANCE_COUNT];

/* sum.c calls these once, before all other functions. */
void sum_portable_prepare(void);
void sum_folds_prepare(void);
void sum_combine_prepare(void);

/* x^(n * 2^first) modulo the polynomial, as a register of 64 or 32 bits. `first` says whether n counts bits
 * (SUM_BITS) or bytes (SUM_BYTES); 8 * n may not fit 64 bits. */
enum { SUM_BITS = 0, SUM_BYTES = 3 };
uint64_t sum_power64(uint64_t n, int first);
uint32_t sum_power32(uint64_t n, int first);
uint64_t sum_multiply64(uint64_t a, uint64_t b);
uint32_t sum_multiply32(uint32_t a, uint32_t b);

/* The register after data whose whole 16-byte pieces were folded into `lane`. The lane is congruent to all of those
 * pieces. So the portable code runs over the lane with an empty register, which multiplies by x^W and reduces as a
 * CRC's end does, and then over the rest. */
static inline uint32_t sum_finish32(const uint8_t lane[16], const uint8_t *data, size_t size)
{
        return sum_portable.crc32(sum_portable.crc32(0, lane, 16), data + size / 16 * 16, size % 16);
}
static inline uint64_t sum_finish64(const uint8_t lane[16], const uint8_t *data, size_t size)
{
        return sum_portable.crc64(sum_portable.crc64(0, lane, 16), data + size / 16 * 16, size % 16);
}

#if defined(__x86_64__) && (defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 9)
#define SUM_X86 1
/* A copy's source belongs to the program, which may change or free it meanwhile: see os->copy_guarded. */
#define SUM_ANY_MEMORY __attribute__((no_sanitize_address, no_sanitize_thread))
extern const struct sum_ops sum_pclmul;      /* crc_pclmul.c */
extern const struct sum_ops sum_vpclmul_256; /* crc_vpclmul_256.c */
extern const struct sum_ops sum_vpclmul_512; /* crc_vpclmul_512.c */
/* copy_x86.c; call sum_copy_avx* only if the processor has that instruction set. */
void sum_copy_sse2(void *to, const void *from, size_t size);
void sum_copy_avx2(void *to, const void *from, size_t size);
void sum_copy_avx512(void *to, const void *from, size_t size);
/* sum_copy_head copies up to the first 64-byte boundary of `to`; sum_copy_rest copies the end of a copy of at least
 * 64 bytes. Both are in copy_x86.c. */
size_t sum_copy_head(uint8_t *to, const uint8_t *from);
void sum_copy_rest(uint8_t *to, const uint8_t *from, size_t size);
#endif

#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__)
#define SUM_ARM 1
extern const struct sum_ops sum_pmull; /* crc_pmull.c */
#endif

#endif
