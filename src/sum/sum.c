#include "sum/sum.h"

#include <pthread.h>
#include <stdatomic.h>

#include "sum/cpu.h"
#include "sum/sum_private.h"

static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static _Atomic(const struct sum_ops *) chosen;

/* The functions for `isa`; NULL if this machine or this build lacks it. */
static const struct sum_ops *ops_of(enum sum_isa isa)
{
        switch (isa) {
        case SUM_ISA_PORTABLE:
                return &sum_portable;
#ifdef SUM_X86
        case SUM_ISA_PCLMUL:
                return cpu_has(CPU_PCLMUL | CPU_SSE4_1) ? &sum_pclmul : NULL;
        case SUM_ISA_VPCLMUL_256:
                return cpu_has(CPU_AVX2 | CPU_VPCLMULQDQ) && ops_of(SUM_ISA_PCLMUL) ?
                       &sum_vpclmul_256 : NULL;
        case SUM_ISA_VPCLMUL_512:
                return cpu_has(CPU_AVX512F | CPU_AVX512VL) && ops_of(SUM_ISA_VPCLMUL_256) ?
                       &sum_vpclmul_512 : NULL;
#else
        case SUM_ISA_PCLMUL:
        case SUM_ISA_VPCLMUL_256:
        case SUM_ISA_VPCLMUL_512:
                break;
#endif
        case SUM_ISA_PMULL:
#ifdef SUM_ARM
                return cpu_has(CPU_ARM_PMULL) ? &sum_pmull : NULL;
#endif
        case SUM_ISA_COUNT:
                break;
        }
        return NULL;
}

static void prepare(void)
{
        const struct sum_ops *best = NULL;

        sum_portable_prepare();
        sum_combine_prepare();
        sum_folds_prepare();
        for (int isa = SUM_ISA_COUNT - 1; !best; isa--)
                best = ops_of((enum sum_isa)isa);
        atomic_store(&chosen, best);
}

static const struct sum_ops *ops(void)
{
        const struct sum_ops *used = atomic_load_explicit(&chosen, memory_order_acquire);

        if (used)
                return used;
        pthread_once(&prepared, prepare);
        return atomic_load(&chosen);
}

uint32_t sum_crc32(uint32_t crc, const void *data, size_t size)
{
        return ~ops()->crc32(~crc, data, size);
}

uint64_t sum_crc64(uint64_t crc, const void *data, size_t size)
{
        return ~ops()->crc64(~crc, data, size);
}

void sum_both(const void *data, size_t size, uint32_t *crc32, uint64_t *crc64)
{
        uint32_t raw32 = ~*crc32;
        uint64_t raw64 = ~*crc64;

        ops()->both(data, size, &raw32, &raw64);
        *crc32 = ~raw32;
        *crc64 = ~raw64;
}

uint32_t sum_crc32_combine(uint32_t crc_a, uint32_t crc_b, uint64_t size_b)
{
        ops(); /* prepares the tables */
        return sum_multiply32(crc_a, sum_power32(size_b, SUM_BYTES)) ^ crc_b;
}

uint64_t sum_crc64_combine(uint64_t crc_a, uint64_t crc_b, uint64_t size_b)
{
        ops();
        return sum_multiply64(crc_a, sum_power64(size_b, SUM_BYTES)) ^ crc_b;
}

void sum_copy_stream(void *to, const void *from, size_t size)
{
        ops()->copy_stream(to, from, size);
}

void sum_copy_both(void *to, const void *from, size_t size, uint32_t *crc32, uint64_t *crc64)
{
        uint32_t raw32 = ~*crc32;
        uint64_t raw64 = ~*crc64;

        if (ops()->copy_both && size >= SUM_STREAM_MIN) {
                ops()->copy_both(to, from, size, &raw32, &raw64);
        } else {
                ops()->copy_stream(to, from, size);
                ops()->both(to, size, &raw32, &raw64);
        }
        *crc32 = ~raw32;
        *crc64 = ~raw64;
}

bool sum_copies_both(void)
{
        return ops()->copy_both != NULL;
}

bool sum_copies_both_unnoticed(void)
{
        return ops()->is_unnoticed;
}

enum sum_isa sum_isa_used(void)
{
        const struct sum_ops *used = ops();
        int isa = SUM_ISA_COUNT - 1;

        while (isa > SUM_ISA_PORTABLE && ops_of((enum sum_isa)isa) != used)
                isa--;
        return (enum sum_isa)isa;
}

int sum_isa_force(enum sum_isa isa)
{
        const struct sum_ops *forced;

        ops(); /* makes the first-use choice now, so that it cannot override this one */
        forced = ops_of(isa);
        if (!forced)
                return -1;
        atomic_store(&chosen, forced);
        return 0;
}
