#include "base/text.h"

#include <stdint.h>

/* How many bytes follow a first byte, and the range that the second one must lie in; -1: not a first byte. */
static int following(uint8_t first, uint8_t *ret_low, uint8_t *ret_high)
{
        *ret_low = 0x80;
        *ret_high = 0xbf;
        if (first < 0x80)
                return 0;
        if (first >= 0xc2 && first <= 0xdf) /* c0, c1: overlong */
                return 1;
        if (first >= 0xe0 && first <= 0xef) {
                if (first == 0xe0)
                        *ret_low = 0xa0; /* else overlong */
                if (first == 0xed)
                        *ret_high = 0x9f; /* else a surrogate */
                return 2;
        }
        if (first >= 0xf0 && first <= 0xf4) {
                if (first == 0xf0)
                        *ret_low = 0x90; /* else overlong */
                if (first == 0xf4)
                        *ret_high = 0x8f; /* else above U+10FFFF */
                return 3;
        }
        return -1;
}

bool text_is_utf8(const char *text, size_t size)
{
        const uint8_t *bytes = (const uint8_t *)text;

        for (size_t k = 0; k < size;) {
                uint8_t low, high;
                int count = following(bytes[k++], &low, &high);

                if (count < 0 || (size_t)count > size - k)
                        return false;
                while (count-- > 0) {
                        if (bytes[k] < low || bytes[k] > high)
                                return false;
                        low = 0x80;
                        high = 0xbf;
                        k++;
                }
        }
        return true;
}
