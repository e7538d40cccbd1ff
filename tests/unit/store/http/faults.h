/* faults.h - the faults that a test's server simulates. Unlike an emulator it loses answers and changes bytes. */
#ifndef NB_TESTS_STORE_FAULTS_H
#define NB_TESTS_STORE_FAULTS_H

#include "store/http/server.h"

enum fake_fault {
        FAKE_NONE,
        FAKE_BUSY,        /* 503 */
        FAKE_BROKEN,      /* 500 after the request was done */
        FAKE_LOST,        /* done, and the connection reset in place of an answer */
        FAKE_RESET,       /* the connection reset, and nothing done */
        FAKE_CUT,         /* the body of the answer ends early */
        FAKE_FLIP_ANSWER, /* one bit of the answer's body */
        FAKE_FLIP_BODY,   /* one bit of the request's body, before anything looks at it */
        FAKE_STALL,
        FAKE_FAULTS,
};

/* So many transfers each test of faults makes: NEBULA_TEST_TRANSFERS, or 50. `make faults-long` makes 1,000. */
unsigned fault_transfers(void);
/* A fault of any kind for one of `*(unsigned *)argument` requests, on average. */
enum fake_fault fault_seldom(const struct server_call *call, void *argument);
/* Called before the request is done. True: it is not done, and was answered. The server holds no lock. */
bool fault_before(struct server_call *call, enum fake_fault fault);
/* Answers a request that was done, with the fault. */
void fault_answer(struct server_call *call, enum fake_fault fault, int status, const char *fields, const char *body, size_t size);

#endif
