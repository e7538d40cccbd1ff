/* slots_private.h - the trainers of a job that count steps. The catalogue's lock guards it. Only the files of this room see it (catalogue/room.h). */
#ifndef NB_AGENT_PULSE_SLOTS_PRIVATE_H
#define NB_AGENT_PULSE_SLOTS_PRIVATE_H

#include "agent/pulse/pace.h"
#include "agent/pulse/pulse.h"

struct pulse {
        struct pulse *next;
        uint64_t nonce; /* of the session */
        int fd;
        struct ipc_pulse last; /* the last sample */
        struct pace pace;
};
struct job_pulse {
        struct pulse *first;
        struct pulse_hang hang;
        int64_t look_at_ns;
        int64_t stepped_ns; /* the last step of these trainers, also of those that have ended; 0: none is known */
        bool is_writing; /* a thread writes the stacks */
};

#endif
