/*
 * human.h - numbers for people: sizes, durations, ages. Every function writes
 * to the caller's text and returns it. Threads: pure functions.
 */
#ifndef NB_CLI_HUMAN_H
#define NB_CLI_HUMAN_H

#include <stdint.h>

#define HUMAN_MAX 48

const char *human_size(uint64_t bytes, char text[HUMAN_MAX]);                 /* "512 B", "1.4 GiB" */
const char *human_speed(uint64_t bytes, double seconds, char text[HUMAN_MAX]); /* "1.4 GiB/s" */
const char *human_duration(double seconds, char text[HUMAN_MAX]);             /* "3.2 ms", "41 s", "2 h 5 min" */
/* How long ago; both arguments are seconds since 1970. A time of 0 is "-", one in the future "just now". */
const char *human_age(double then, double now, char text[HUMAN_MAX]);         /* "3 min ago", "just now", "-" */
const char *human_time(double then, char text[HUMAN_MAX]);                    /* local "2026-11-21 10:42:31" */

#endif
