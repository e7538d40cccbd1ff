/*
 * sum.h - checksums and copies of large memory.
 *
 * CRC-32 is the IEEE one of zip (reflected 0xEDB88320); CRC-64 is NVME
 * (reflected 0x9A6C9329AC4BC9B5, init and xorout all ones), which Azure and S3
 * check on upload. Both are in their finished form: start with 0 and pass the
 * result of the piece before. One file per instruction set; the dispatcher
 * picks the best that this machine has at first use.
 *
 * Threads: all functions are pure but for the one-time choice.
 */
#ifndef NB_SUM_SUM_H
#define NB_SUM_SUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

uint32_t sum_crc32(uint32_t crc, const void *data, size_t size);
uint64_t sum_crc64(uint64_t crc, const void *data, size_t size);
/* Both in one pass over memory. */
void sum_both(const void *data, size_t size, uint32_t *crc32, uint64_t *crc64);
/* crc of AB from crc of A, crc of B and the size of B. */
uint32_t sum_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b);
uint64_t sum_crc64_combine(uint64_t crc_a, uint64_t crc_b, uint64_t size_b);
/* Copies past the caches (non-temporal stores) where that helps; any alignment. */
void sum_copy_stream(void *to, const void *from, size_t size);
/* sum_copy_stream and, on the way, sum_both of what is at `to` then, also when somebody changes `from` meanwhile. */
void sum_copy_both(void *to, const void *from, size_t size, uint32_t *crc32, uint64_t *crc64);
/* Whether that takes little longer than the copy alone, which waits for memory (VPCLMULQDQ). */
bool sum_copies_both(void);
/* Whether it takes hardly longer: nobody who waits for the copy notices (AVX-512). */
bool sum_copies_both_unnoticed(void);

enum sum_isa { SUM_ISA_PORTABLE, SUM_ISA_PCLMUL, SUM_ISA_VPCLMUL_256, SUM_ISA_VPCLMUL_512 };
/* For tests and doctor: what is in use; forcing returns 0, or -1 when this machine lacks it. */
enum sum_isa sum_isa_used(void);
int sum_isa_force(enum sum_isa isa);

#endif
