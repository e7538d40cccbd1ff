/*
 * metrics_server.h - an HTTP server of one page, /metrics, for `nebula metrics --listen`.
 */
#ifndef NB_CLI_METRICS_SERVER_H
#define NB_CLI_METRICS_SERVER_H

#include "nebula.h"

/* `address`: PORT, HOST:PORT or [HOST]:PORT with a numeric host; the default host is 127.0.0.1. Prints the address, and returns only on
 * failure: NEBULA_INVALID, the address is not valid; NEBULA_UNAVAILABLE, it cannot listen there, or this build has no server. */
enum nebula_status metrics_serve(const char *address, const char *path, const char *history, struct nebula_error *error);

#endif
