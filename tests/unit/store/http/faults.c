#include "store/http/faults.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STALL_MS 400

unsigned fault_transfers(void)
{
        const char *count = getenv("NEBULA_TEST_TRANSFERS");

        return count ? (unsigned)atoi(count) : getenv("NEBULA_TEST_NIGHTLY") ? 50 : 20;
}

enum fake_fault fault_seldom(const struct server_call *call, void *argument)
{
        static uint64_t state = 1;
        unsigned *seldom = argument;

        state = state * 6364136223846793005u + 1442695040888963407u;
        if ((state >> 33) % *seldom)
                return FAKE_NONE;
        return 1 + (enum fake_fault)((state >> 40) % (FAKE_FAULTS - 1));
}

bool fault_before(struct server_call *call, enum fake_fault fault)
{
        if (fault == FAKE_FLIP_BODY && call->body_size)
                ((char *)(uintptr_t)call->body)[call->body_size / 3] ^= 4;
        if (fault != FAKE_BUSY && fault != FAKE_RESET && fault != FAKE_STALL)
                return false;
        if (fault == FAKE_BUSY)
                server_say(call, 503, "", "");
        if (fault == FAKE_STALL)
                server_stall(call, STALL_MS);
        if (fault != FAKE_BUSY)
                server_reset(call);
        return true;
}

void fault_answer(struct server_call *call, enum fake_fault fault, int status, const char *fields, const char *text, size_t size)
{
        char head[1200], *body = malloc(size + 1);
        int length;

        memcpy(body, text ? text : "", size);
        if (fault == FAKE_FLIP_ANSWER && size)
                body[size / 2] ^= 1;
        if (fault == FAKE_BROKEN) {
                server_say(call, 500, "", "");
        } else if (fault == FAKE_LOST) {
                server_reset(call);
        } else if (fault == FAKE_CUT && size > 1) {
                length = snprintf(head, sizeof head, "HTTP/1.1 %d Cut\r\n%sContent-Length: %zu\r\n\r\n", status, fields, size);
                server_raw(call, head, (size_t)length);
                server_raw(call, body, size / 2);
                server_close(call);
        } else {
                server_answer(call, status, fields, body, size);
        }
        free(body);
}
