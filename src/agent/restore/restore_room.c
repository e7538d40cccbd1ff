#include "agent/catalogue/catalogue.h"
#include "agent/restore/answers.h"
#include "agent/restore/slots_private.h"
#include "agent/rooms.h"

const struct room restore_room = { .job_slots = { { offsetof(struct job, answers), sizeof(struct job_answers) } }, .job_ends = answers_end };
