/*
 * stacks.h - what the threads of processes wait for, as text.
 *
 * From outside: name, state, and as far as the machine allows the system call and the kernel's stack of each thread (/proc/PID/task). From inside:
 * a process that has named a signal writes the stack of each thread to a descriptor of its own, which the agent reads. Native stacks come from eu-stack or
 * gdb, if the node has one of them and the kernel lets it attach.
 *
 * Any thread calls it without locks; it takes STACKS_NATIVE_MS and some seconds at most for all processes together.
 */
#ifndef NB_AGENT_PULSE_STACKS_H
#define NB_AGENT_PULSE_STACKS_H

#include <stdint.h>
#include <stdio.h>

struct stacks_of {
        uint32_t pid, rank, signal; /* signal 0: it writes none */
        int32_t fd;                 /* where it writes them */
        uint32_t is_ended;          /* the process is to be killed afterwards */
        uint64_t beats, step;
        double silent_s, limit_s;
        char phase[64];
};

#define STACKS_NATIVE_MS INT64_C(30000)

/* native_ms: the time that is left for native stacks. */
void stacks_write(const struct stacks_of *process, int64_t *native_ms, FILE *file);

#endif
