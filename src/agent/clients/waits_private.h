/*
 * waits_private.h - requests that wait for a change, and notice when their client is gone.
 */
#ifndef NB_AGENT_CLIENTS_WAITS_PRIVATE_H
#define NB_AGENT_CLIENTS_WAITS_PRIVATE_H

#include "agent/clients/session_private.h"

/* Call when the client sends another request or is gone. SESSION_ENDED: it did so while it waited, which breaks a
 * rule. SESSION_SLOW: call session_await_answer. */
enum session_step session_end_wait(struct connection *connection);
/* Waits until storage has been read too, for a limited time: a version in memory may be older than storage's, or
 * carry files over from it. */
void session_await_scan(struct connection *connection);
/* Waits until the thread that answers this connection's WAIT is done with the connection. */
void session_await_answer(struct connection *connection);
request_run request_wait, request_stop, request_find_path, request_watch;

/* The lock is held for all of these but the first. */
int64_t wait_deadline(int64_t timeout_ms); /* timeout_ms < 0: INT64_MAX, no limit */
/* Waits for a change. NEBULA_OK: check again, unless *ret_timeout. */
enum nebula_status wait_slice(struct connection *connection, pthread_cond_t *cond, int64_t until_ns, bool *ret_timeout, struct nebula_error *error);
/* NEBULA_TIMEOUT, and what the version waits for. */
enum nebula_status wait_timeout(const struct version *version, struct nebula_error *error);
/* Whether ranks of other nodes are missing and have been silent for so long that no call waits longer: their node may be gone for good.
 * The version stays, because the ranks may still come. */
bool wait_others_are_silent(const struct catalogue *catalogue, const struct version *version);
/* wait_timeout for such a version. */
enum nebula_status wait_in_vain(const struct catalogue *catalogue, const struct version *version, struct nebula_error *error);
/* Why a version can never become durable as things are; NEBULA_OK: it can. */
enum nebula_status wait_durable_refused(const struct version *version, struct nebula_error *error);

#endif
