/* rooms.h - the rooms of the agent that the catalogue calls (catalogue/room.h). */
#ifndef NB_AGENT_ROOMS_H
#define NB_AGENT_ROOMS_H

#include "agent/catalogue/room.h"

extern const struct room clients_room, commit_room, memory_room, peers_room, persist_room, publish_room, pulse_room, restore_room;
extern const struct room *const agent_rooms[];

#endif
