/*
 * evictions.h - asks the metadata service of a cloud, once a second, while a client waits for the notice that this machine is to go. The
 * clients that wait share each answer.
 */
#ifndef NB_AGENT_CLIENTS_EVICTIONS_H
#define NB_AGENT_CLIENTS_EVICTIONS_H

#include "ipc/ipc.h"
#include "store/notice.h"

struct catalogue;

/* The answers of one cloud's service. The catalogue's lock guards them, except `kept`: that belongs to the asking thread. */
struct evictions {
        bool is_being_asked;
        int64_t due_ns; /* of the next question */
        uint32_t failures; /* in a row */
        double noticed_at, failed_at; /* when a notice came, and when the service had failed often enough to say so; 0: neither */
        struct notice notice;
        struct nebula_error error;
        char kept[NOTICE_KEPT_MAX];
};

/* NULL: no memory. Lock held. */
struct evictions *evictions_of(struct catalogue *catalogue, enum nebula_cloud cloud);
/* Asks if a question is due. Lock held; it is released meanwhile. */
enum nebula_status evictions_ask(struct catalogue *catalogue, enum nebula_cloud cloud, struct nebula_error *error);
/* Finds the event after `since`. False: there is none. Lock held. */
bool evictions_event(const struct evictions *evictions, double since, struct ipc_event *ret_event);

#endif
