/* Applies hostile bytes as a delta: nothing outside the state is touched. */
#include <stdlib.h>
#include <string.h>

#include "delta/delta.h"
#include "sum/sum.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define STATE 4096

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
        uint8_t *state = calloc(1, STATE), *delta = malloc(size + 1);
        uint64_t sum = 0, all;

        if (state && delta) {
                memcpy(delta, data, size);
                if (size >= 24) { /* as if the state were the base, and the sum right: so the fuzzer gets beyond the header */
                        memcpy(&sum, delta + 16, 8);
                        all = sum_crc64(0, delta + 16, size - 16);
                        memcpy(delta + 8, &all, 8);
                }
                (void)delta_apply(state, STATE, &sum, (struct delta_bytes[]){ { delta, size } }, 1, NULL);
        }
        free(state);
        free(delta);
        return 0;
}
