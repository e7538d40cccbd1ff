#include "agent/rooms.h"

const struct room *const agent_rooms[] = { &clients_room, &commit_room, &memory_room, &persist_room, &publish_room, &peers_room, &pulse_room, &restore_room, NULL };
