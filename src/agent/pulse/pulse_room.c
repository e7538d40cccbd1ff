#include "agent/catalogue/catalogue.h"
#include "agent/pulse/slots_private.h"
#include "agent/rooms.h"

const struct room pulse_room = { .job_slots = { { offsetof(struct job, pulse), sizeof(struct job_pulse) } }, .job_ends = pulse_forget };
