/*
 * sum.h - checksums and copies of large memory.
 *
 * CRC-32 is that of zip (IEEE, reflected 0xEDB88320). CRC-64 is NVME (reflected
 * 0x9A6C9329AC4BC9B5, init and xorout all ones), which Azure and S3 check on
 * upload. All values are finished: start with 0, and pass the result of the
 * previous piece. Each instruction set has its own file. The first use picks
 * the best one that this machine has.
 *
 * Threads: all functions are pure, except that the first use chooses the
 * instruction set.
 */
#ifndef NB_SUM_SUM_H
#define NB_SUM_SUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

uint32_t sum_crc32(uint32_t crc, const void *data, size_t size);
uint64_t sum_crc64(uint64_t crc, const void *data, size_t size);
/* CRC-32C (reflected 0x82F63B78), which Google checks on upload. */
uint32_t sum_crc32c(uint32_t crc, const void *data, size_t size);
/* Computes both sums in one pass over memory. */
void sum_both(const void *data, size_t size, uint32_t *crc32, uint64_t *crc64);
/* The CRC of AB from the CRC of A, the CRC of B, and the size of B. */
uint32_t sum_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);
uint64_t sum_crc64_combine(uint64_t crc_a, uint64_t crc_b, uint64_t size_b);
/* Copies with non-temporal stores where that is faster; any alignment. */
void sum_copy_stream(void *to, const void *from, size_t size);
/* sum_copy_stream, and sum_both of the bytes that were stored at `to`. The sums match `to` even if another thread
 * changes `from` meanwhile. */
void sum_copy_both(void *to, const void *from, size_t size, uint32_t *crc32, uint64_t *crc64);
/* Whether sum_copy_both takes little longer than the copy alone, which waits for memory (VPCLMULQDQ). */
bool sum_copies_both(void);
/* Whether sum_copy_both is so close to the copy alone that a save does not become slower (AVX-512). */
bool sum_copies_both_unnoticed(void);

enum sum_isa { SUM_ISA_PORTABLE, SUM_ISA_PCLMUL, SUM_ISA_VPCLMUL_256, SUM_ISA_VPCLMUL_512, SUM_ISA_PMULL, SUM_ISA_COUNT };
/* For tests and doctor: the instruction set in use. sum_isa_force returns 0, or -1 if this machine lacks it. */
enum sum_isa sum_isa_used(void);
int sum_isa_force(enum sum_isa isa);

#endif
